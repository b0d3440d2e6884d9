"""Operations in flight: their kinds, how each begins and ends, and how its outcome is applied."""
