HF_HOME: str
