//! One module for each command. Code that several commands share is in `client`, `deployment`, `models` or
//! `terminal`.

pub(crate) mod adapters;
pub(crate) mod bench;
pub(crate) mod cert;
pub(crate) mod chat;
pub(crate) mod check;
pub(crate) mod doctor;
pub(crate) mod down;
pub(crate) mod drain;
pub(crate) mod key;
pub(crate) mod logs;
pub(crate) mod ls;
pub(crate) mod manual;
pub(crate) mod ps;
pub(crate) mod pull;
pub(crate) mod registry;
pub(crate) mod show;
pub(crate) mod simulate;
pub(crate) mod slo;
pub(crate) mod status;
pub(crate) mod top;
pub(crate) mod tune;
pub(crate) mod up;
pub(crate) mod verify;
