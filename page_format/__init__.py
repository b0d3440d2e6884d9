"""What a page is: its layout, its shards, its object in a store, and what the object is called."""
