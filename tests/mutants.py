"""Plant faults in the package, one at a time: the suite must reject each.

Run it by ``make mutants``; it takes minutes. Each fault is a text that stands
once in a module and what takes its place. A fault that the tests in charge
of its module pass is printed, and makes the exit status 1.
"""

import argparse
import concurrent.futures
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = {
    "accumulation.py": "accumulation state stateful statistics equivalence "
    "updates function",
    "function.py": "function interrupts stateful statistics",
    "updates.py": "updates",
    "state.py": "state backend",
    "_backend.py": "backend function updates accumulation state",
    "_compat.py": "compat",
}
ALL = " ".join(sorted({name for t in TESTS.values() for name in t.split()}))
MUTANTS = [
    # The boundary, and what is emptied at it.
    ("accumulation.py", "T.ge(now.calls, N)", "T.gt(now.calls, N)"),
    ("accumulation.py", "T.ge(now.calls, N)", "T.eq(now.calls, N)"),
    (
        "accumulation.py",
        "T.ge(now.calls, N)",
        "T.ge(window.held.calls, N)",
    ),
    (
        "accumulation.py",
        "return T.set_subtensor(total[start:], 0)",
        "return total",
    ),
    (
        "accumulation.py",
        "T.switch(when, 0, total.shape[0])",
        "T.switch(when, 1, total.shape[0])",
    ),
    (
        "accumulation.py",
        "start = None if when is None else T.switch(when, 0, total.shape[0])",
        "start = None",
    ),
    (
        "accumulation.py",
        "return zero if when is None else T.switch(when, zero, total)",
        "return zero",
    ),
    (
        "accumulation.py",
        "return zero if when is None else T.switch(when, zero, total)",
        "return zero if when is None else total",
    ),
    (
        "accumulation.py",
        "        for held in window.pairs\n        if held not in window.kept",
        "        for held in window.held.sums\n        if held not in window.kept",
    ),
    (
        "accumulation.py",
        "        for held in window.pairs\n        if held not in window.kept",
        "        for held in [window.held.calls, window.held.weight]",
    ),
    ("accumulation.py", "        if held not in window.kept", ""),
    # The gate.
    (
        "accumulation.py",
        "gated = _switched(T, boundary, new, rule)",
        "gated = [m if v not in window.params else "
        "T.switch(boundary, m, v) for m, v in zip(new, rule)]",
    ),
    ("accumulation.py", "T.eq(boundary, 0), [*rule", "boundary, [*rule"),
    ("accumulation.py", "[*rule, *totals], [*new", "[*new, *totals], [*new"),
    ("accumulation.py", "        if held.dtype == mean.dtype\n", ""),
    ("accumulation.py", "return updated, updates", "return boundary, updates"),
    (
        "accumulation.py",
        "        boundary = T.and_(window.accepted, boundary)\n",
        "        pass\n",
    ),
    (
        "accumulation.py",
        "        new = _switched(T, weighs, new, rule)\n",
        "",
    ),
    # The sums and their mean.
    ("accumulation.py", "return total + amount", "return amount"),
    (
        "accumulation.py",
        "return T.switch(condition, total + amount, total)",
        "return total + amount",
    ),
    (
        "accumulation.py",
        "return T.switch(condition, total + amount, total)",
        "return total + T.cast(condition, total.dtype) * amount",
    ),
    (
        "accumulation.py",
        "grads = [weight.astype(grad.dtype) * grad for grad in grads]",
        "pass",
    ),
    (
        "accumulation.py",
        "new_weight = added(contributes, held.weight, weight)",
        "new_weight = held.weight + 1",
    ),
    (
        "accumulation.py",
        "(total / divisor.astype(total.dtype))",
        "(total * 1)",
    ),
    (
        "accumulation.py",
        "divisor = T.switch(T.eq(totals.weight, 0), 1, totals.weight)",
        "divisor = totals.weight",
    ),
    (
        "accumulation.py",
        '"float32" if param.dtype == "float16" else param.dtype',
        "param.dtype",
    ),
    ("accumulation.py", ").astype(param.dtype)\n", ")\n"),
    ("accumulation.py", "N <= np.iinfo(dtype).max", "N < np.iinfo(dtype).max"),
    (
        "accumulation.py",
        "N <= np.iinfo(dtype).max",
        "N <= np.iinfo(dtype).max + 1",
    ),
    ("accumulation.py", 'return "int64"', 'return "int32"'),
    # Weights and bad calls.
    (
        "accumulation.py",
        "return weight, finite, finite",
        "return weight, finite, None",
    ),
    (
        "accumulation.py",
        "    weight = T.switch(valid, weight, np.nan)\n",
        "",
    ),
    ("accumulation.py", "T.le(held.weight + weight, high)", "True"),
    (
        "accumulation.py",
        "T.le(held.weight + weight, high)",
        "T.le(weight, high)",
    ),
    (
        "accumulation.py",
        "T.le(held.weight + weight, high)",
        "T.lt(held.weight + weight, high)",
    ),
    ("accumulation.py", "T.ge(weight, low)", "T.ge(weight, 0)"),
    ("accumulation.py", "T.ge(weight, low)", "T.gt(weight, low)"),
    (
        "accumulation.py",
        "T.or_(contributes, T.eq(weight, 0))",
        "contributes",
    ),
    (
        "_backend.py",
        "T.lt(abs(grad), np.inf)",
        "T.lt(grad, np.inf)",
    ),
    (
        "accumulation.py",
        "window.skipped, window.skipped + 1)",
        "window.skipped + 1, window.skipped)",
    ),
    # Flush, state, corners.
    (
        "accumulation.py",
        "        updates.update(_reset(self._window))\n",
        "",
    ),
    (
        "accumulation.py",
        "replace=dict(zip(self._means, means))",
        "replace={}",
    ),
    ("accumulation.py", "variable.zero(borrow=True)", "variable.name"),
    (
        "accumulation.py",
        "[*self, *moving]",
        "[*self]",
    ),
    ("accumulation.py", "if param in params[:i]:", "if False:"),
    (
        "accumulation.py",
        "updates.setdefault(variable, self[variable])",
        "pass",
    ),
    (
        "accumulation.py",
        "    updates.update(zip(window.averages, window.averages))\n",
        "",
    ),
    (
        "accumulation.py",
        "    rule.update(zip(window.averages, means[n:]))\n",
        "",
    ),
    (
        "accumulation.py",
        "backend.tensor.switch(nothing, average, mean)",
        "mean",
    ),
    # The two functions.
    ("function.py", "N <= self.pending", "N < self.pending"),
    ("function.py", "if before < self.pending and", "if"),
    (
        "function.py",
        "    applied.update(reset)\n",
        "",
    ),
    ("function.py", "(steps, steps + 1)", "(steps, steps)"),
    ("function.py", "    collected.update(carried)\n", ""),
    ("function.py", '        **({"no_default_updates": frozen} if frozen else {}),\n', ""),
    ("function.py", "if v not in frozen", ""),
    (
        "function.py",
        "        for values in zip(*results):\n            _check_rows",
        "        for values in zip(*results[1:]):\n            _check_rows",
    ),
    ("function.py", "np.int8(counts)", "np.int8(1)"),
    ("function.py", "size = (size + 1) // 2", "size = size // 4 + 1"),
    (
        "function.py",
        "            self._trained._restore(saved)\n",
        "",
    ),
    ("function.py", "            self._size = size\n", ""),
    (
        "function.py",
        "np.dot(values[weighed], weights[weighed]) / weights.sum()",
        "values.mean()",
    ),
    (
        "function.py",
        "                self.reset()\n                if lost",
        "                if lost",
    ),
    ("function.py", "            handler(*caught[0])\n", "            pass\n"),
    (
        "function.py",
        "        _signal.signal(_signal.SIGINT, handler)\n        if caught",
        "        if caught",
    ),
    ("function.py", "positive=by_length", "positive=True"),
    # The drop-in module.
    ("updates.py", "-limit, limit", "-limit, limit * 2"),
    (
        "updates.py",
        "    if noise:\n        seed",
        "    if False:\n        seed",
    ),
    ("updates.py", "grad + normal(", "grad - 0 * normal("),
    ("updates.py", "options.pop(\"noise\"), 1e-8", "options.pop(\"noise\"), 1e-7"),
    ("updates.py", "learning_rate / N", "learning_rate"),
    ("updates.py", "T.eq(calls, 0), momentum, 1", "T.eq(calls, 0), 1, momentum"),
    ("updates.py", "beta2 * u, abs(grad)", "beta2 * u, grad"),
    ("updates.py", "T.maximum(v_max, updates[v])", "updates[v]"),
    # Saved state.
    ("state.py", "not fits or old.dtype != new.dtype", "not fits"),
    ("state.py", "in from_zero and new < 0", "in from_zero and not new >= 0"),
    ("state.py", "in from_zero and new < 0", "in from_zero and new < -1"),
    ("state.py", "set(named) ^ set(values)", "set(named) - set(values)"),
    ("state.py", "_array(variable.get_value())", "_array(variable.get_value(borrow=True))"),
    ("state.py", "[*names, \"unnamed\", \"file\"]", "[*names, \"unnamed\"]"),
    # The backend and the repairs.
    ("_backend.py", "isinstance(error, MemoryError)", "False"),
    ("_backend.py", "            **self._pattern(like),\n", ""),
    ("_backend.py", "if len(owned) > 1:", "if False:"),
    ("_backend.py", "allow_convert=states_shape", "allow_convert=True"),
    ("_backend.py", 'return {"shape": shape}', "pass"),
    ("_backend.py", "isinstance(v.container.data, Generator)", "False"),
    ("_backend.py", 'if hasattr(linker, "jit_compile"):', "if False:"),
    ("state.py", "algorithm.state = state", "pass"),
    (
        "accumulation.py",
        "return functools.partial(rule, **kw)",
        "return rule",
    ),
    ("_compat.py", "insert(0, LasagneWatcher())", "append(LasagneWatcher())"),
    ("_compat.py", '== "lasagne.layers"', '== "lasagne"'),
    ("_compat.py", 'vars(theano).setdefault("gof", gof)', "theano.gof = gof"),
    ("_compat.py", "sys.version_info >= (3, 11)", "False"),
    ("_compat.py", "ignore_border=ignore_border", "ignore_border=True"),
]  # fmt: skip


def survives(mutant):
    """Say whether the tests pass with a fault planted, or with None."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("lasagne_accum", "tests", "examples"):
            shutil.copytree(str(ROOT / name), os.path.join(folder, name))
        for name in ("pyproject.toml", "setup.py", "README.md", "CHANGES.md"):
            shutil.copy(str(ROOT / name), folder)
        tests = ALL
        if mutant is not None:
            path = Path(folder, "lasagne_accum", mutant[0])
            path.write_text(planted(*mutant), "utf-8")
            tests = TESTS[mutant[0]]
        tests = [f"tests/test_{name}.py" for name in tests.split()]
        command = [sys.executable, "-m", "pytest", "-x", "-q", *tests]
        result = subprocess.run(
            command,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    # 1: tests failed. 2: the package did not even import.
    return result.returncode not in (1, 2)


def planted(module, old, new):
    """Give a module with a fault in the place of what stands there once."""
    text = (ROOT / "lasagne_accum" / module).read_text("utf-8")
    if text.count(old) != 1:
        raise SystemExit(f"{module} has {text.count(old)} times {old!r}.")
    return text.replace(old, new)


def main():
    """Plant each fault, and tell which ones the tests passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--only", default="", help="a part of a module's name")
    options = parser.parse_args()
    mutants = [m for m in MUTANTS if options.only in m[0]]

    for mutant in mutants:
        planted(*mutant)
    if not survives(None):
        print("The tests fail with no fault planted: mend that first.")
        return 1
    survivors = 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for mutant, alive in zip(mutants, pool.map(survives, mutants)):
            survivors += alive
            print("SURVIVED" if alive else "rejected", *map(repr, mutant))
            sys.stdout.flush()
    print(f"{len(mutants)} faults planted, {survivors} survived")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
