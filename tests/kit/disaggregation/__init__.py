"""What tests of messages between groups share: a relay that cuts connections, and groups of inboxes."""
