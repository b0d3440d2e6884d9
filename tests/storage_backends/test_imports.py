"""Which folders of the stores know which."""

from tests.kit.source_tree import neighbours, read_library

DAMAGE = "storage_backends/damage"


def test_only_fault_injection_knows_how_stored_objects_are_damaged() -> None:
    library = {module.path: module for module in read_library()}

    importers = [
        str(module.path)
        for module in library.values()
        if any(each.is_under(DAMAGE) for each in neighbours(module, library))
        and not module.is_under(DAMAGE)
    ]

    assert importers == ["storage_backends/wrappers/fault.py"]
