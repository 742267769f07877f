// runtime.cpp - the emulator's runtime as one translation unit: compiled once, loaded once per process.
#include "async.cpp"
#include "launch.cpp"
#include "report.cpp"
#include "scheduler.cpp"
#include "sync.cpp"
#include "trace.cpp"
