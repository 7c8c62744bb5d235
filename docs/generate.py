"""MkDocs hooks that generate pages of the documentation: settings, commands, and copies of READMEs."""

from __future__ import annotations

import re
from os.path import relpath
from pathlib import Path
from typing import Any

import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPO = Path(__file__).parents[1]
README_PAGES = {
    "guides/model-card.md": "engine/models/nano",
}
"""Page of the site → folder of the README that it shows."""

IMAGE = re.compile(r"\]\((?:\.\./)+(?:pipeline/assets|training|benchmarks/results)/([\w-]+\.(?:jpg|svg))\)")
"""A link from a page to an image of the repository, so that the page also works outside the site."""

FILE_BLOCK = re.compile(r"^```(\w+) ([\w.-]+)$", re.MULTILINE)
"""A code block that is a file: "```yaml cameras.yaml". Tests write it under this name; the site shows it as a title."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to the documentation site (MkDocs hook)."""
    pages = {
        "reference/configuration.md": configuration(),
        "reference/commands.md": commands(),
        **{page: readme_page(REPO / folder / "README.md", page) for page, folder in README_PAGES.items()},
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    images = [*(REPO / "pipeline/assets").glob("*.jpg")]
    images += [*(REPO / "training").glob("*.svg"), *(REPO / "benchmarks/results").glob("*.svg")]
    for image in sorted(images):
        files.append(File.generated(config, f"assets/{image.name}", abs_src_path=str(image)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Show file names as titles of code blocks, and correct the paths of images (MkDocs hook)."""
    up = "../" * page.file.src_uri.count("/")
    markdown = IMAGE.sub(rf"]({up}assets/\1)", markdown)
    return FILE_BLOCK.sub(r'```\1 title="\2"', markdown)


def readme_page(readme: Path, page: str) -> str:
    """Convert a README to a page of the documentation site. Links to files outside `docs` become plain text."""

    def link(match: re.Match[str]) -> str:
        mark, text, target = match["mark"], match["text"], match["target"]
        path, _, anchor = target.partition("#")
        if target.startswith(("http", "#")):
            return match[0]
        place = (readme.parent / path).resolve()
        if mark:
            return f"![{text}]({relpath(place, (REPO / 'docs' / page).parent)})"
        docs = REPO / "docs"
        if place.is_relative_to(docs):
            return f"[{text}]({relpath(place, (docs / page).parent)}{'#' + anchor if anchor else ''})"
        return text

    text = readme.read_text(encoding="utf-8")
    return re.sub(r"(?P<mark>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)", link, text)


def configuration() -> str:
    """Return a Markdown page that describes each key of a configuration file, by section."""
    from saccade.pipeline.cli.options import help_of
    from saccade.pipeline.cli.sections import sections
    from saccade.pipeline.config import RunConfig, flags_of

    lines = [
        "# Configuration",
        "",
        "Every key of a configuration file. Each is a flag of `saccade run`, too; a flag wins over the file. "
        "`saccade configs manual` prints the same as a commented YAML file.",
    ]
    for heading, keys in sections().items():
        lines += ["", f"## {heading.capitalize()}"]
        for key in keys:
            extra: Any = RunConfig.model_fields[key].json_schema_extra
            flags = " or ".join(f"`{flag}`" for flag in flags_of(key)) if key != "streams" else ""
            lines += ["", f"### `{key}`", "", help_of(key)]
            if extra.get("more"):
                lines += ["", str(extra["more"])]
            if flags:
                lines += ["", f"Flag: {flags}." + (f" Environment: `{extra['env']}`." if extra.get("env") else "")]
    return "\n".join(lines) + "\n"


def commands() -> str:
    """Return a Markdown page with the help of each command."""
    from saccade.pipeline.cli.main import app

    lines = ["# Command line", "", "`saccade COMMAND --help` prints the same."]

    def describe(command: Any, name: str) -> None:
        lines.extend(["", f"## `{name}`", "", (command.help or "").strip()])
        context = typer.Context(command, info_name=name)
        rows = []
        for one in command.get_params(context):
            if "--help" in one.opts:
                continue
            shown = one.metavar or one.name.upper()
            named = shown if one.param_type_name == "argument" else ", ".join([*one.opts, *one.secondary_opts])
            value = "" if one.param_type_name == "argument" or not one.metavar else f" `{one.metavar}`"
            text = " ".join((one.help or "").split()).replace("|", "\\|")
            rows.append(f"| `{named}`{value} | {text} |")
        if rows and not getattr(command, "commands", None):
            lines.extend(["", "| | |", "|---|---|", *rows])
        for below, inner in getattr(command, "commands", {}).items():
            describe(inner, f"{name} {below}")

    describe(typer.main.get_command(app), "saccade")
    return "\n".join(lines) + "\n"
