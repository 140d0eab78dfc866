"""The pages: every example in them runs and prints what they show, and what they say of the format is complete."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import specmodel

ROOT = Path(__file__).parent.parent


def loaded(path: Path) -> ModuleType:
    """A module by its path: neither tests/ nor docs/ is a package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


examples = loaded(ROOT / "tests" / "docs_examples.py")
PAGES = {str(page.relative_to(ROOT)): page for page in examples.pages()}


# Every command is a process: those of the how-to pages and of the reference take a minute.
SLOW_PAGES = ("docs/howto/", "docs/reference/")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n.startswith(SLOW_PAGES) else n for n in PAGES]
)
def test_examples_of_the_page(name: str) -> None:
    page = examples.check(PAGES[name])
    assert not page.faults, "\n\n".join(page.faults)


@pytest.mark.parametrize("name", PAGES)
def test_links_of_the_page_lead_somewhere(name: str) -> None:
    text = re.sub(r"^```.*?^```", "", PAGES[name].read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not re.match(r"[a-z]+:", target):
            assert (PAGES[name].parent / target).exists(), f"{name} links to {target}"


def test_readme_and_ci_set_up_alike() -> None:
    """The second command of the README is what .ci/run does in an environment of its own."""
    readme, script = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    packages = re.findall(r"pip install --quiet ('[^']+')\n", script)[0]
    assert f".venv/bin/pip install -q {packages} && .venv/bin/pytest" in readme
    assert re.search(r"^pytest ", script, re.MULTILINE)


def test_tables_say_what_the_code_says() -> None:
    """Every key of the format and every prior is on its page, as the code has it."""
    wrong = loaded(ROOT / "docs" / "tables.py").main([])
    assert not wrong, wrong


def test_every_public_name_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    assert [name for name in specmodel.__all__ if not re.search(rf"\b{name}\b", text)] == []


PAGE = """
```{code-block} yaml
:caption: five.yaml
schema: specmodel.calibration/1
name: five
```

```console
$ cat five.yaml
schema: specmodel.calibration/1
name: five
$ echo 61.2 tok/s; \\
> echo between
61.3 tok/s
between
$ printf 'a\\nb\\nc\\n'
a
...
$ exit 3
$ echo $?
3
```

```pycon
>>> x = 1
```

- an item

  ```pycon
  >>> x + 1
  2
  ```

```yaml
measurements: {cycles: [{num_steps: 0, tok_s: 200}]}
```

```json
[1, 2]
```

```sh
nonsense that is not run
grep graph a.log | specmodel diagnose five.yaml - --batch 8 \\
  --worth 5% > out.txt  # a remark
```
"""


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("", "", None),
        ("61.3 tok/s", "64.3 tok/s", "but the page shows"),
        ("61.3 tok/s", "61.3 tokens", "but the page shows"),
        ("\na\n...", "\na\nb", "but the page shows"),
        ("\n...\n", "\n...\nd\n", "but the page shows"),
        ("$ echo $?\n3\n", "", "ended with 3"),
        ("  2\n", "  3\n", "Expected"),
        ("tok_s: 200", "tok_s: -200", "tok_s: must be > 0"),
        ("tok_s: 200", "tok: 200", "tok: must be a key of the format"),
        ("name: five\n```\n", "name: five six\n```\n", "name"),
        ("[1, 2]", "[1, 2", "delimiter"),
        ("```sh", "```fish", "'fish'"),
        ("nonsense that", "for x in; done", "syntax error"),
        ("--worth 5%", "--worths 5%", "--worths"),
        ("--batch 8", "--batch 8,9", "one number"),
        ("specmodel diagnose", "specmodel diagnosis", "no command"),
    ],
)
def test_the_check_of_the_examples(tmp_path: Path, old: str, new: str, fault: str | None) -> None:
    """A good page passes, and each kind of fault is found."""
    assert old in PAGE
    page = tmp_path / "page.md"
    page.write_text(PAGE.replace(old, new, 1) if old else PAGE)
    faults = examples.check(page).faults
    assert (not faults) if fault is None else (fault in "\n".join(faults))


def test_pages_are_rewritten_only_where_the_output_changed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    cut = PAGE.replace("$ echo 61.2 tok/s; \\\n", "$ seq 3; echo 61.2 tok/s; \\\n").replace("\n61.3", "\n...\n61.3")
    for good in (PAGE, cut):
        page.write_text(good.replace("61.3 tok/s", "70 tok/s"))
        page.write_text(examples.check(page).rewritten())
        assert page.read_text() == good.replace("61.3 tok/s", "61.2 tok/s")
