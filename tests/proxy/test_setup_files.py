"""Settings files: whole or not at all, with what their owner had kept beside them."""

from pathlib import Path

import pytest

from proxy.setup_files import SettingsFile, SetupProblem, read_object, read_text, write_files


def test_what_was_there_is_kept_beside_it_and_what_is_new_has_no_past(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "below" / "new.json"
    old.write_text("before")
    old.chmod(0o640)
    written = write_files([SettingsFile(old, "before", "after"), SettingsFile(new, None, "new")])
    assert written == [old, new]
    assert (old.read_text(), new.read_text()) == ("after", "new")
    assert (tmp_path / "old.json.kvtether.bak").read_text() == "before"
    assert old.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == [
        "new.json",
        "old.json",
        "old.json.kvtether.bak",
    ]


def test_what_we_wrote_ourselves_is_no_past_of_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "it.json"
    path.write_text("his")
    write_files([SettingsFile(path, "his", "his and ours")])
    write_files([SettingsFile(path, "his and ours", "his and ours again", had_ours=True)])
    write_files([SettingsFile(path, "his and ours again", None, had_ours=True)])
    assert not path.exists()
    assert (tmp_path / "it.json.kvtether.bak").read_text() == "his"


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "dotfiles.json", tmp_path / "it.json"
    real.write_text("his")
    link.symlink_to(real)
    write_files([SettingsFile(link, "his", "ours")])
    assert link.is_symlink()
    assert real.read_text() == "ours"


def test_what_does_not_change_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "it.json"
    assert write_files([SettingsFile(path, "same", "same"), SettingsFile(path, None, None)]) == []
    assert not path.exists()


@pytest.mark.parametrize("text", ["{", "[1]", "{} // a comment", "nonsense"])
def test_what_is_no_object_is_said_not_to_be(tmp_path: Path, text: str) -> None:
    with pytest.raises(SetupProblem, match=r"it\.json"):
        read_object(tmp_path / "it.json", text)


def test_an_absent_or_empty_file_holds_an_empty_object(tmp_path: Path) -> None:
    path = tmp_path / "it.json"
    assert read_object(path, read_text(path)) == read_object(path, " \n") == {}


def test_a_file_that_cannot_be_read_is_said_to_be_one(tmp_path: Path) -> None:
    path = tmp_path / "it.json"
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(SetupProblem, match="cannot be read"):
        read_text(path)


def test_a_place_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupProblem, match="cannot be written"):
        write_files([SettingsFile(tmp_path / "file" / "it.json", None, "new")])
