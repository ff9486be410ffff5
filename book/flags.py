"""Writes the tables of flags in guide/flags.md from the flags' definitions: `python book/flags.py`."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.core import flags  # noqa: E402

PAGE = Path(__file__).with_name("guide") / "flags.md"
BEGIN, END = "<!-- flags: python book/flags.py -->", "<!-- end of flags -->"
OWN = ("epochs", "batch_size", "window", "learning_rate", "local_optimizer")  # their defaults are a scheme's own
CODE = re.compile(
    r"--\w+(=\w+)?|FILE\.py:FUNCTION|'[^']*\*[^']*'|runs/SCHEME/TIME|model\.keras|common/\w+\.sh|common\.Embedding(\(.*\))?"
)


def tables():
    """Returns the flags that every `run.sh` has, as --help has them: a table for each group."""
    values, lines = flags.table(*flags.of_every_scheme({"local_optimizer": "sgd"})), []
    for title, names in flags.in_groups(values):
        if names:
            lines += ["", f"## {title}", "", "| flag | default | meaning |", "|---|---|---|"]
        lines += [f"| `--{name}` | {' | '.join(_cells(values[name]))} |" for name in names]
    return "\n".join([*lines, ""])


def _cells(flag):
    """Returns what stands in the columns of a flag: its default, and its meaning."""
    kinds, _, text = flag.help.rpartition(">: ")
    text, _, default = text.removesuffix(")").partition(" (default: ") if " (default: " in text else (text, "", "")
    text, default = (CODE.sub(lambda code: f"`{code[0]}`", part) for part in (text, default))
    if kinds:
        text = f"{', '.join(f'`{kind}`' for kind in kinds.strip('<').split('|'))}: {text}"
    if flag.name in OWN:
        return "the scheme's own", text
    default = f"`{default}`" if re.fullmatch(r"[\d.]+", default) else default
    if flag.default is not None and not default:
        default = f"`{flag.default:g}`" if isinstance(flag.default, float) else f"`{flag.default}`"
        default = {"`True`": "on", "`False`": "off"}.get(default, default)
    return default, text


def written(page):
    """Returns the text of a page with the tables of the present definitions."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{tables()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
