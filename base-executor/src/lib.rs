//! base-executor
