"""Any Lockstep store as HiCache's storage backend; ranks agree by HiCache's votes, not Lockstep's."""
