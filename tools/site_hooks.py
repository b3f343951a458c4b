"""Add what docs/ does not have to the site: the reference from the docstrings, and the sources that documents link to.

So the documents are the same on the site and as plain Markdown. Each section of docs/api.md is about a module; it
becomes a page of the reference, to which the names in it link.
"""

import re
from pathlib import Path

from griffe import Extension, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
SECTION = re.compile(r"^## (.+)\n((?:(?!## ).*\n)*)", re.MULTILINE)
NAME = re.compile(r"^\| `([\w.]+)([^`]*)` \|", re.MULTILINE)
SOURCE = re.compile(r"\]\(\.\./([^)#]+)\)")
LANGUAGES = {".cuh": "cuda", ".h": "cpp"}


def reference() -> dict[str, str]:
    """Return the pages of the reference by their paths."""
    sections = SECTION.findall((ROOT / "docs/api.md").read_text())
    modules = [module for module, _ in sections]
    pages = {}
    for module, text in sections:
        entries = "\n".join(entry(f"{module}.{name}", modules) for name, _ in NAME.findall(text))
        pages[f"reference/{module}.md"] = f"# {module}\n\n{entries}"
    return pages


def entry(name: str, modules: list[str]) -> str:
    """Return the directive that makes mkdocstrings write the entry of a name, without what has a page of its own."""
    options = f"    options:\n      heading: {name}\n      toc_label: {name.rpartition('.')[2]}\n"
    return f"::: {name}\n{options}" + "      members: false\n" * (name in modules)


def on_config(config: MkDocsConfig) -> None:
    (pages,) = (section["Reference"] for section in config.nav or () if "Reference" in section)
    pages += reference()


def on_files(files: Files, config: MkDocsConfig) -> None:
    linked = {path for file in files.documentation_pages() for path in SOURCE.findall(file.content_string)}
    for path, text in reference().items():
        files.append(File.generated(config, path, content=text))
    for path in sorted(linked):
        language = LANGUAGES.get(Path(path).suffix, Path(path).suffix[1:])
        text = f"---\nsearch: {{exclude: true}}\n---\n\n# {path}\n\n~~~~{language}\n{(ROOT / path).read_text()}~~~~\n"
        files.append(File.generated(config, f"source/{path}.md", content=text, inclusion=InclusionLevel.NOT_IN_NAV))


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri == "api.md":
        markdown = SECTION.sub(linked_section, markdown)
    return SOURCE.sub(r"](source/\1.md)", markdown)


def linked_section(section: re.Match[str]) -> str:
    """Return a section of docs/api.md whose names link to their entries."""
    return NAME.sub(rf"| [`\1\2`][{section[1]}.\1] |", section[0])


class Examples(Extension):
    """Rename `Example:` in docstrings to `Examples:`, the only name of that section that griffe knows."""

    def on_object(self, *, obj: Object, **_: object) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
