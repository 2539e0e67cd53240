"""Every Python example of the documentation runs."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OPTIONAL = ("accelerate", "lightning", "transformers")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
@pytest.mark.filterwarnings("ignore:ampplug")
def test_examples_run(page: Path, tmp_path, monkeypatch):
    """The blocks of a page share one namespace, in order; those that import a package that is not here are left out. expect: no error."""
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        imported = set(re.findall(r"^(?:from|import) (?:ampplug\.integrations\.)?(\w+)", block, re.MULTILINE))
        if any(name in imported and find_spec(name) is None for name in OPTIONAL):
            continue
        exec(compile(block, str(page), "exec"), namespace)


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
