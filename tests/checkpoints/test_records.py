import csv

import pytest

from locater.records import write_csv

pytestmark = pytest.mark.quick


def test_a_table_without_rows_is_an_empty_file(tmp_path):
    write_csv([], tmp_path / "table.csv")
    assert not (tmp_path / "table.csv").read_text().strip()


def test_a_column_that_only_some_rows_have_is_kept(tmp_path):
    write_csv([{"a": 1}, {"a": 2, "b": [3, 4]}], tmp_path / "table.csv")
    with (tmp_path / "table.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == [{"a": "1", "b": ""}, {"a": "2", "b": "[3, 4]"}]
