"""SGLang's pools as pages of Lockstep: how they lie there, and the slots that loads are brought to."""
