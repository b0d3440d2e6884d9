"""SGLang's pools as Lockstep pages: their layouts, and the slots that loads fill."""
