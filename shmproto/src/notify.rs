//! What a process tells whoever started it, systemd or `holobiont up`: how far it is, that it serves, that it lives.
//!
//! Both listen at `NOTIFY_SOCKET`, and both may be stopped while their socket is full. So nobody waits here: a thread does,
//! and what is too much for it is not said. A process that ends takes that thread along: it [`flush`]es first.

use std::{
    sync::{
        OnceLock,
        mpsc::{Sender, SyncSender, channel, sync_channel},
    },
    time::Duration,
};

use sd_notify::NotifyState;

/// Messages that wait to be taken.
const MAX_MESSAGES: usize = 16;
/// Longest wait of a process that ends until its last words are taken.
const FLUSH_WAIT: Duration = Duration::from_secs(1);

static TELLER: OnceLock<SyncSender<NotifyCommand>> = OnceLock::new();

enum NotifyCommand {
    Tell(String),
    /// Dropped in its turn, when all before it has been said.
    Flush {
        _pending: Sender<()>,
    },
}

/// Tells it, soon. Without `NOTIFY_SOCKET` nothing is said.
pub fn send_status(state: &[NotifyState<'_>]) {
    if std::env::var_os("NOTIFY_SOCKET").is_none() {
        return;
    }
    let text: Vec<String> = state.iter().map(ToString::to_string).collect();
    let _ = TELLER.get_or_init(start_teller).try_send(NotifyCommand::Tell(text.join("\n")));
}

/// Waits until what was told has been said, for a second at most.
pub fn flush() {
    let Some(teller) = TELLER.get() else { return };
    let (pending, said) = channel();
    let _ = teller.try_send(NotifyCommand::Flush { _pending: pending });
    let _ = said.recv_timeout(FLUSH_WAIT);
}

fn start_teller() -> SyncSender<NotifyCommand> {
    let (teller, messages) = sync_channel(MAX_MESSAGES);
    let tell = move || {
        for message in messages {
            if let NotifyCommand::Tell(text) = message {
                // It may not listen any more; that is no reason to stop.
                let _ = sd_notify::notify(&[NotifyState::Custom(&text)]);
            }
        }
    };
    // Without a thread nothing is said: messages have nobody to take them.
    let _ = std::thread::Builder::new().name("notify".to_owned()).spawn(tell);
    teller
}
