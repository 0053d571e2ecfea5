"""The site builds without warnings and without a network, and shows the public API."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import scute_compile
from scute_compile import runtime_min
from tests.docs.pages import ROOT

pytestmark = pytest.mark.skipif(find_spec("mkdocs") is None, reason="needs the extra `docs`")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_pages_fetch_nothing_from_other_hosts(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(r'<(?:script|img|iframe)[^>]* src="(https?:[^"]+)"', text)
        fetched += re.findall(r'<link[^>]* rel="(?:stylesheet|preconnect|preload)"[^>]* href="(https?:[^"]+)"', text)
        assert fetched == [], page


def test_the_api_page_documents_every_public_name(site: Path) -> None:
    text = (site / "reference" / "python" / "index.html").read_text(encoding="utf-8")
    for package in (scute_compile, runtime_min):
        for name in getattr(package, "__all__", ()):
            if not name.startswith("__"):
                assert f'id="{package.__name__}.{name}"' in text, name
