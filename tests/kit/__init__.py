"""What the tests share: stores, servers, ranks and engines under test, and claims that many make."""
