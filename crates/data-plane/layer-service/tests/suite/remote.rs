//! The door for clients that speak ZeroMQ: who is let in, and what others notice of those who misbehave.

mod admission;
mod hostile;
mod support;
mod traffic;
