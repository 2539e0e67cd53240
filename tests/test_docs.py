"""Every Python example of the documentation runs."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
@pytest.mark.filterwarnings("ignore:ampplug")
def test_examples_run(page: Path, tmp_path, monkeypatch):
    """The blocks of a page share one namespace, in order. A block after `<!-- needs NAME -->` runs where that package is. expect: no error."""
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    for package, block in re.findall(r"(?:<!-- needs (\w+) -->\n)?```python\n(.*?)```", page.read_text(), re.DOTALL):
        if package and find_spec(package) is None:
            continue
        exec(compile(block, str(page), "exec"), namespace)


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
