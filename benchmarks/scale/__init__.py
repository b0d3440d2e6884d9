"""What agreement costs at a thousand ranks: a model of its own code, fitted to measurements."""
