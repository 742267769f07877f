"""The command line: `cuflash` and `python -m cuflash`.  What each command does is in commands.py.

Exit codes: 0 all is well; 1 a check or a demo found a wrong number; 2 bad input; 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence

import cuflash
from cuflash.errors import CuflashError
from cuflash.problem import FLOAT_DTYPES

EXAMPLES = """examples:
  cuflash info                                     what is here, and what will run
  cuflash demo                                     a real sentence encoder, every attention through cuflash
  cuflash demo "A cat sleeps." "A kitten naps."    the same, on your sentences
  cuflash check --quick                            is what runs here right?
  cuflash explain --len 4096 --head-dim 128 --causal --device sm_90a
  cuflash cache list                               compiled kernels
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    >>> main(["cache", "where"])
    0
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell: 1>&-
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    try:
        arguments = list(sys.argv[1:] if arguments is None else arguments)
        if arguments[:1] in (["bench"], ["lab"]):  # they parse their own arguments, --help included
            code = importlib.import_module(f"cuflash.{arguments[0]}").main(arguments[1:])
        else:
            options = parser().parse_args(arguments)
            code = options.call(options)
        sys.stdout.flush()
        return code
    except CuflashError as error:
        print(f"cuflash: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("cuflash: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader (head, less) has seen enough
        drop_output()
        return 0
    except OSError as error:  # a full disk, a folder that may not be written
        drop_output()
        print(f"cuflash: {error}", file=sys.stderr)
        return 2


def drop_output() -> None:
    """Give the interpreter's last flush of stdout somewhere to go."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def words(text: str) -> list[str]:
    """A comma-separated list: "a,b" -> ["a", "b"]."""
    found = [word.strip() for word in text.split(",") if word.strip()]
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing; give names with commas between them")
    return found


def edge(text: str) -> int | None:
    """One side of a window: a number, or "none" for unbounded."""
    return None if text.lower() == "none" else int(text)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="cuflash",
        description="Exact attention for CuPy and NumPy.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"cuflash {cuflash.__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (add_info, add_demo, add_check, add_explain, add_cache):
        add(commands)
    commands.add_parser("bench", help="measure kernels side by side")
    commands.add_parser("lab", help="change a kernel and see at once whether it is right and how fast")
    return top


def command(commands, name: str, run: str, text: str) -> argparse.ArgumentParser:
    """A subparser that calls the function `run` of commands.py, imported only then."""

    def call(options: argparse.Namespace) -> int:
        from cuflash import commands as module

        return getattr(module, run)(options)

    made = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    made.set_defaults(call=call)
    return made


def add_device(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--device", choices=("auto", "cpu", "gpu"), default="auto", help="auto: the GPU where there is one"
    )


def add_info(commands) -> None:
    command(commands, "info", "info", "what is here (GPU, CuPy, NVRTC, cache) and what will run")


def add_demo(commands) -> None:
    text = "run a pretrained sentence encoder, every attention through cuflash"
    made = command(commands, "demo", "demo", text)
    made.add_argument("sentences", nargs="*", metavar="SENTENCE", help="default: five pairs of sentences")
    made.add_argument("--file", metavar="PATH", help="one sentence a line; - reads standard input")
    made.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32",
                      help="what q, k and v are rounded to for the attention")  # fmt: skip
    add_device(made)


def add_check(commands) -> None:
    made = command(commands, "check", "check", "compare what runs on this machine with the float64 reference")
    made.add_argument("--quick", action="store_true", help="fewer cases")
    rows = "kernels by name, emulated on the CPU; numpy is the NumPy path"
    record = "where the record goes; default: kernels/measured/ in a checkout, else ./cuflash-records/"
    cubins = "take compiled kernels from DIR, whatever NVRTC made them (see cuflash cache build)"
    made.add_argument("--rows", type=words, metavar="A,B", help=rows)
    made.add_argument("--dtypes", type=words, metavar="A,B", help=f"of {','.join(FLOAT_DTYPES)}")
    made.add_argument("--cases", type=words, metavar="A,B", help="cases by name")
    made.add_argument("--record", metavar="PATH", help=record)
    made.add_argument("--no-record", action="store_true", help="write no record")
    made.add_argument("--cubins", metavar="DIR", help=cubins)
    add_device(made)


def add_explain(commands) -> None:
    text = "say which kernel would run, with what tile and memory, and why"
    made = command(commands, "explain", "explain", text)
    sizes = made.add_argument_group("sizes")
    for name, default, text in (
        ("batch", 1, ""),
        ("len", 1024, "query rows"),
        ("len-k", None, "key rows; default: --len"),
        ("heads", 8, "query heads"),
        ("heads-k", None, "key heads; default: --heads"),
        ("head-dim", 64, ""),
        ("head-dim-v", None, "default: --head-dim"),
    ):
        text = text or f"default {default}"
        sizes.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text)
    made.add_argument("--dtype", choices=FLOAT_DTYPES, default="float16")
    made.add_argument("--backward", action="store_true", help="explain the gradients")
    made.add_argument("--deterministic", action="store_true", help="gradients repeatable bit for bit")
    made.add_argument("--kernel", metavar="ROW", help="a kernel by name")
    made.add_argument("--device", metavar="D", help="sm_90a (need not be here), cuda:0, emulated, host")
    made.add_argument("--compile", action="store_true", help="with registers, spills and blocks per SM")
    made.add_argument("--run", nargs="?", const="emulated", choices=("emulated",),
                      help="also run it, on random numbers, in the emulator")  # fmt: skip
    options = made.add_argument_group("options of the call")
    options.add_argument("--causal", action="store_true")
    options.add_argument("--window", type=edge, nargs=2, metavar=("LEFT", "RIGHT"), help="numbers, or none")
    options.add_argument("--query-offset", type=int, metavar="N")
    options.add_argument("--scale", type=float, metavar="X")
    options.add_argument("--softcap", type=float, metavar="X")
    options.add_argument("--dropout", type=float, metavar="P")
    options.add_argument("--alibi", action="store_true", help="with alibi_slopes")
    options.add_argument("--bias", action="store_true", help="with a bias for every score")
    options.add_argument("--mask", action="store_true", help="with a boolean mask for every score")
    options.add_argument("--sink", action="store_true", help="with a sink per head")
    options.add_argument("--key-lengths", action="store_true", help="with key_lengths")


def add_cache(commands) -> None:
    made = commands.add_parser("cache", help="compiled kernels: where, list, clear, build",
                               description="Compiled kernels on disk.")  # fmt: skip
    parts = made.add_subparsers(title="commands", metavar="COMMAND", required=True)
    command(parts, "where", "cache_where", "the folder of compiled kernels ($CUFLASH_CACHE_DIR changes it)")
    command(parts, "list", "cache_list", "every compiled kernel")
    command(parts, "clear", "cache_clear", "delete every compiled kernel")
    build = command(parts, "build", "cache_build", "compile all that `cuflash check` needs; no GPU needed")
    build.add_argument("--arch", required=True, metavar="SM", help="sm_80, sm_90, ...: where it will run")
    build.add_argument("--to", metavar="DIR", help="the folder to fill; default: the cache")
    build.add_argument("--quick", action="store_true", help="what check --quick needs")
    build.add_argument("--rows", type=words, metavar="A,B", help="kernels by name; default: all")
    build.add_argument("--dtypes", type=words, metavar="A,B", help="default: all")
