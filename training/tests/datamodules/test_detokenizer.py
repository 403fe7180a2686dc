"""The rules of the detokenizer, one by one and together."""

import pytest

from src.datamodules.datasets.detokenizer import DATASET_TOKENIZATION_REGISTRY, detokenizer_of, wikitext_detokenize

RULES = [
    ("the players ' song", "the players' song"),
    ("a well @-@ known 1 @,@ 000 @.@ 5", "a well-known 1,000.5"),
    ("this : that ; more . and ! or ? yes , no", "this: that; more. and! or? yes, no"),
    ("f ( x ) [ y ] { z }", "f (x) [y] {z}"),
    ("he said \" yes \" and ' no ' too", "he said \"yes\" and 'no' too"),
    ("= = = = Deep = = = =", "==== Deep ===="),
    ("= = Title = =", "== Title =="),
    ("12 ° C", "12°C"),
    (" \n = Title = \n \n Text", "\n= Title =\n\nText"),
    ("number N of the dog 's", "number 1 of the dog's"),
    ("plain text stays.", "plain text stays."),
]


@pytest.mark.parametrize("tokenised, text", RULES)
def test_rules(tokenised, text):
    assert wikitext_detokenize(tokenised) == text


@pytest.mark.parametrize("name", ["wikitext", "Salesforce/wikitext", "data/wikitext-2", "data/wikitext-103-raw/"])
def test_registry_knows(name):
    assert detokenizer_of(name) is DATASET_TOKENIZATION_REGISTRY["wikitext"] is wikitext_detokenize


@pytest.mark.parametrize("name", ["openwebtext", "wikitexts", "wikitext/other"])
def test_registry_does_not_know(name):
    assert detokenizer_of(name) is None
