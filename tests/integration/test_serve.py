from tests.integration.processes import X

def test_x() -> None:
    assert X == 1
