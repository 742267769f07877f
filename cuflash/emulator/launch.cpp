// launch.cpp - one launch: workers take clusters of blocks in order until none is left.  The interface for
// Python.
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <time.h>

#include "runtime.hpp"

namespace emulated {

static std::mutex pool_guard;
static std::vector<Worker*> idle_workers;   // with their fibers and stacks

Launch::Launch() = default;
Launch::~Launch() = default;

static Worker* take_worker() {
  std::lock_guard<std::mutex> lock(pool_guard);
  if (idle_workers.empty()) return new Worker;
  Worker* worker = idle_workers.back();
  idle_workers.pop_back();
  return worker;
}

static void work(Worker* worker) {
  Launch* launch = worker->launch;
  use_signal_stack(worker);
  while (!launch->stop) {
    const u64 team = launch->next_team++;   // ascending: a block may wait for one with a smaller number
    if (team >= launch->n_teams) break;
    run_team(worker, team);
    launch->teams_done++;
    worker->progress++;
  }
  std::lock_guard<std::mutex> lock(launch->guard);
  const u64* from = reinterpret_cast<const u64*>(&worker->counters);
  u64* to = reinterpret_cast<u64*>(&launch->counters);
  for (u64 i = 0; i < sizeof(Counters) / sizeof(u64); i++) to[i] += from[i];
  launch->events.insert(launch->events.end(), worker->events.begin(), worker->events.end());
  if (--launch->workers_left == 0) launch->finished.notify_all();
}

static double cpu_seconds(pthread_t thread) {
  clockid_t clock;
  timespec time;
  if (pthread_getcpuclockid(thread, &clock) != 0 || clock_gettime(clock, &time) != 0) return 0;
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// A worker that has used stall_seconds of CPU since its last progress is interrupted by a signal.
static void watch(Launch* launch, std::vector<u64>& seen, std::vector<double>& since) {
  for (size_t i = 0; i < launch->workers.size(); i++) {
    Worker* worker = launch->workers[i];
    const u64 progress = worker->progress;
    const double now = cpu_seconds(launch->threads[i].native_handle());
    if (progress != seen[i] || now == 0) {
      seen[i] = progress;
      since[i] = now;
    } else if (now - since[i] > launch->request.stall_seconds) {
      worker->timed_out = true;
      pthread_kill(launch->threads[i].native_handle(), SIGSEGV);
      since[i] = now;
    }
  }
}

struct Running {
  Launch launch;
  std::vector<u64> seen;
  std::vector<double> since;
};

extern "C" {

void* emulator_start(const Request* request) {
  Running* running = new Running;
  Launch& launch = running->launch;
  launch.request = *request;
  const u64 n_blocks = static_cast<u64>(request->grid[0]) * request->grid[1] * request->grid[2];
  launch.n_teams = n_blocks / request->cluster;
  const u64 wanted = request->n_workers < launch.n_teams ? request->n_workers : launch.n_teams;
  catch_signals();
  launch.workers_left = static_cast<int>(wanted);
  for (u64 i = 0; i < wanted; i++) {
    Worker* worker = take_worker();
    worker->launch = &launch;
    worker->timed_out = false;
    worker->events.clear();
    memset(&worker->counters, 0, sizeof worker->counters);
    launch.workers.push_back(worker);
  }
  running->seen.assign(wanted, 0);
  running->since.assign(wanted, 0);
  for (Worker* worker : launch.workers) launch.threads.emplace_back(work, worker);
  return running;
}

// 1 when the launch is over, 0 after `milliseconds`.
int emulator_wait(void* handle, int milliseconds) {
  Running* running = static_cast<Running*>(handle);
  Launch& launch = running->launch;
  {
    std::unique_lock<std::mutex> lock(launch.guard);
    if (launch.finished.wait_for(lock, std::chrono::milliseconds(milliseconds),
                                 [&] { return launch.workers_left == 0; }))
      return 1;
  }
  watch(&launch, running->seen, running->since);
  return 0;
}

// Ends a launch early: after it emulator_wait soon returns 1.
void emulator_stop(void* handle) {
  Launch& launch = static_cast<Running*>(handle)->launch;
  launch.stop = true;
  for (std::thread& thread : launch.threads) pthread_kill(thread.native_handle(), SIGSEGV);
}

unsigned long long emulator_blocks_done(void* handle) {
  Launch& launch = static_cast<Running*>(handle)->launch;
  return launch.teams_done * launch.request.cluster;
}

unsigned long long emulator_n_events(void* handle) {
  return static_cast<Running*>(handle)->launch.events.size();
}

// Frees the launch.  error: room for its message, empty when all went well.  events: room for
// emulator_n_events.
void emulator_finish(void* handle, Counters* counters, Event* events, char* error,
                     unsigned long long n_error) {
  Running* running = static_cast<Running*>(handle);
  Launch& launch = running->launch;
  for (std::thread& thread : launch.threads) thread.join();
  release_signals();
  {
    std::lock_guard<std::mutex> lock(pool_guard);
    idle_workers.insert(idle_workers.end(), launch.workers.begin(), launch.workers.end());
  }
  *counters = launch.counters;
  if (events != nullptr) std::copy(launch.events.begin(), launch.events.end(), events);
  snprintf(error, n_error, "%s", launch.error.c_str());
  delete running;
}

}   // extern "C"

}   // namespace emulated
