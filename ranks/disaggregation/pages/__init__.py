"""How other groups read host pages of this one."""
