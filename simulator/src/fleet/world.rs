//! What may happen to a fleet, and what must hold whatever happens.
