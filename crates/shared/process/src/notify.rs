//! Notifies the process's parent, systemd or `holobiont up`: progress, readiness and watchdog signals.
//!
//! The parent listens at `NOTIFY_SOCKET` and may be stopped while its socket is full. So callers do not wait:
//! a thread sends, and messages beyond its queue are dropped. A process that ends stops that thread, so it
//! calls [`flush`] first.

use std::{
    sync::{
        OnceLock,
        mpsc::{Sender, SyncSender, channel, sync_channel},
    },
    time::Duration,
};

use sd_notify::NotifyState;

/// Maximum number of messages in the queue.
const MAX_MESSAGES: usize = 16;
/// Longest wait of an ending process until its last messages are sent.
const FLUSH_WAIT: Duration = Duration::from_secs(1);

static SENDER: OnceLock<SyncSender<NotifyCommand>> = OnceLock::new();

enum NotifyCommand {
    Send(String),
    /// Marker that is dropped after all earlier messages have been sent.
    Flush {
        _pending: Sender<()>,
    },
}

/// Queues a notification. Without `NOTIFY_SOCKET` the call does nothing.
pub fn send_status(state: &[NotifyState<'_>]) {
    if std::env::var_os("NOTIFY_SOCKET").is_none() {
        return;
    }
    let text: Vec<String> = state.iter().map(ToString::to_string).collect();
    let _ = SENDER.get_or_init(start_sender).try_send(NotifyCommand::Send(text.join("\n")));
}

/// Waits until the queued messages are sent, for a second at most.
pub fn flush() {
    let Some(sender) = SENDER.get() else { return };
    let (pending, said) = channel();
    let _ = sender.try_send(NotifyCommand::Flush { _pending: pending });
    let _ = said.recv_timeout(FLUSH_WAIT);
}

fn start_sender() -> SyncSender<NotifyCommand> {
    let (sender, messages) = sync_channel(MAX_MESSAGES);
    let send = move || {
        for message in messages {
            if let NotifyCommand::Send(text) = message {
                // The parent may have stopped listening, which is no reason to stop the thread.
                let _ = sd_notify::notify(&[NotifyState::Custom(&text)]);
            }
        }
    };
    // If the thread cannot start, messages are dropped, because the queue has no receiver.
    let _ = std::thread::Builder::new().name("notify".to_owned()).spawn(send);
    sender
}
