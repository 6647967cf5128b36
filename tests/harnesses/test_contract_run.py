"""Contracts of adapters: which there are, and whose."""

from harnesses.contract_run import CONTRACTS, PAGES, contract_of
from harnesses.modules import modules


def test_every_contract_is_one_of_a_harness_module_and_has_its_page():
    owned = {contract_of(module): module.name for module in modules()}
    contracts = set(CONTRACTS.glob("*_contract.py"))
    assert contracts
    assert contracts <= set(owned)
    assert [owned[each] for each in contracts if not (PAGES / f"{owned[each]}.md").exists()] == []
