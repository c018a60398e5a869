"""The tables of the pages are those that docs/make_specs.py writes; the settings describe each key of a spec."""

import pytest

from docs.make_specs import PAGES, REGION, TABLES, filled
from draftmill.decoders.settings import DECODERS
from draftmill.jobs.config.spec import JobSpec


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_the_tables_of_the_settings(page):
    text = page.read_text()
    assert filled(text) == text, "python -m docs.make_specs"


def test_every_table_is_in_one_page_and_every_decoder_has_one():
    found = [name for page in PAGES for _, name, _ in REGION.findall(page.read_text())]
    assert sorted(found) == sorted(TABLES)
    assert all(f"decoder.{kind}" in found for kind, one in DECODERS.items() if set(one.model_fields) != {"kind"})


def test_a_changed_description_would_change_the_page():
    name = "decoder.jacobi"
    line = next(line for line in TABLES[name]().splitlines() if "tokens of a block" in line)
    page = f"<!-- table: {name} -->\n\n{TABLES[name]()}\n<!-- end -->"
    assert filled(page) == page
    assert filled(page.replace(line, "| block_size | text | 1 | another meaning |")) == page
    with pytest.raises(ValueError, match="other numbers of"):
        filled(page.replace("<!-- end -->", "", 1))


def test_the_json_schema_of_a_spec_describes_every_key():
    schema = JobSpec.model_json_schema()
    bare = [
        f"{model}.{key}"
        for model, one in [*schema["$defs"].items(), ("JobSpec", schema)]
        for key, value in one.get("properties", {}).items()
        if "description" not in value and key != "kind" and not {"$ref", "oneOf"} & value.keys()
    ]
    assert not bare
    assert not [model for model, one in schema["$defs"].items() if not one.get("description")]
