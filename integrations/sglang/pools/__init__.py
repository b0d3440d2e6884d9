"""SGLang's device pools as Lockstep pages: the page layouts, and the device slots of loads."""
