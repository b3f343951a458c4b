"""What the site has that docs/ has not: the reference from the docstrings, and the sources that documents link to.

So the documents are the same on the site and where they are read as plain Markdown. docs/api.md lists the public names;
each of its sections becomes a page of the reference, to which its names link.
"""

import re
from pathlib import Path

from griffe import Extension, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).parent.parent
SECTION = re.compile(r"^## (.+)\n((?:(?!## ).*\n)*)", re.MULTILINE)
NAME = re.compile(r"^\| `([\w.]+)([^`]*)` \|", re.MULTILINE)
SOURCE = re.compile(r"\]\(\.\./([^)#]+)\)")
LANGUAGES = {".cuh": "cuda", ".h": "cpp"}


def reference() -> dict[str, str]:
    """The pages of the reference, by their paths."""
    pages = {}
    for title, text in SECTION.findall((ROOT / "docs/api.md").read_text()):
        names = [name for name, _ in NAME.findall(text)]
        entries = "\n".join(entry(name, names) for name in names)
        pages[f"reference/{slugify(case='lower')(title, '-')}.md"] = f"# {title}\n\n{entries}"
    return pages


def entry(name: str, names: list[str]) -> str:
    """What has mkdocstrings write of a name; of a module alone, where its names have entries of their own."""
    options = f"    options:\n      heading: {name}\n      toc_label: {name.rpartition('.')[2]}\n"
    is_module = any(other.startswith(f"{name}.") for other in names)
    return f"::: torch_nhwc.{name}\n{options}" + "      members: false\n" * is_module


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
        markdown = NAME.sub(r"| [`\1\2`][torch_nhwc.\1] |", markdown)
    return SOURCE.sub(r"](source/\1.md)", markdown)


class Examples(Extension):
    """Has griffe, which knows `Examples:` alone, take the docstrings' `Example:` for the section that it is."""

    def on_object(self, *, obj: Object, **_: object) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
