"""Operations in flight: their kinds, how each begins and ends, and what comes of it."""
