//! What a process tells whoever started it, systemd or `holobiont up`: how far it is, that it serves, that it lives.
//!
//! Both listen at `NOTIFY_SOCKET`, and both may be stopped while their socket is full. So nobody waits here: a thread does,
//! and what is too much for it is not said.

use std::sync::{
    OnceLock,
    mpsc::{SyncSender, sync_channel},
};

use sd_notify::NotifyState;

/// Messages that wait to be taken.
const MAX_MESSAGES: usize = 16;

/// Tells it, soon. Without `NOTIFY_SOCKET` nothing is said.
pub fn tell(state: &[NotifyState<'_>]) {
    static TELLER: OnceLock<SyncSender<String>> = OnceLock::new();
    if std::env::var_os("NOTIFY_SOCKET").is_none() {
        return;
    }
    let text: Vec<String> = state.iter().map(ToString::to_string).collect();
    let _ = TELLER.get_or_init(start_teller).try_send(text.join("\n"));
}

fn start_teller() -> SyncSender<String> {
    let (teller, messages) = sync_channel::<String>(MAX_MESSAGES);
    let tell = move || {
        for message in messages {
            // It may not listen any more; that is no reason to stop.
            let _ = sd_notify::notify(&[NotifyState::Custom(&message)]);
        }
    };
    // Without a thread nothing is said: messages have nobody to take them.
    let _ = std::thread::Builder::new().name("notify".to_owned()).spawn(tell);
    teller
}
