"""What pages take from one group's hosts to another's, beside a bare connection."""
