"""Pages link to files and headings that exist, their configs load, and the site lists each page."""

import json
import re
from pathlib import Path

import pytest

from lowtide.engine.config.config import Config

CHECKOUT = Path(__file__).parents[1]
DOCS = sorted((CHECKOUT / "docs").glob("*.md"))
PAGES = [*DOCS, *(CHECKOUT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]


def prose(page: Path) -> str:
    return re.sub(r"```.*?```|`[^`\n]*\]\([^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    texts = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in texts}


def broken_links(page: Path) -> list[str]:
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if not link.startswith("http")]
    wrong = []
    for link in links:
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b` c\n\n[here](#a-b-c) [there](#a-b) [file](none.md)\n", encoding="utf-8")
    assert broken_links(page) == ["#a-b", "none.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_configs_load(page: Path) -> None:
    for text in re.findall(r"```json\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
        Config.load(json.loads(text))


def test_the_site_lists_each_page() -> None:
    listed = re.findall(r"[\w-]+\.md", (CHECKOUT / "docs/site/mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(listed) == [page.name for page in DOCS]
