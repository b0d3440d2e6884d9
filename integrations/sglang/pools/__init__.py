"""SGLang's pools as Lockstep pages: their layouts, and the device slots that loads fill."""
