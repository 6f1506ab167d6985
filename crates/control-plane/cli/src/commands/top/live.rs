//! Looks and keys, until somebody quits.

use std::{
    io,
    sync::mpsc::{self, Receiver},
    time::Duration,
};

use ratatui::{
    DefaultTerminal,
    crossterm::event::{self, Event, KeyEventKind},
};

use super::{
    page::{Next, Page},
    stats::DashboardSnapshot,
};
use crate::{
    client::{ClientError, GatewayClient},
    terminal::TextStyle,
};

/// How long a key or a new look may go unseen.
const NOTICED_WITHIN: Duration = Duration::from_millis(100);

/// Draws the deployment until somebody quits, and leaves the terminal as it was.
pub(super) fn watch(
    client: GatewayClient,
    first: DashboardSnapshot,
    interval: Duration,
    ink: TextStyle,
) -> io::Result<()> {
    let page = Page::new(client.url(), first, ink);
    let looks = look_again(client, interval);
    let ended = ratatui::try_init().and_then(|terminal| until_quit(terminal, page, &looks));
    ratatui::restore();
    ended
}

/// Looks again and again, on a thread of its own: a gateway that does not answer must not keep anybody from quitting.
fn look_again(client: GatewayClient, interval: Duration) -> Receiver<Result<DashboardSnapshot, ClientError>> {
    let (seen, looks) = mpsc::channel();
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(interval);
            if seen.send(DashboardSnapshot::fetch(&client)).is_err() {
                return;
            }
        }
    });
    looks
}

fn until_quit(
    mut terminal: DefaultTerminal,
    mut page: Page,
    looks: &Receiver<Result<DashboardSnapshot, ClientError>>,
) -> io::Result<()> {
    loop {
        looks.try_iter().for_each(|look| page.update(look));
        terminal.draw(|frame| page.draw(frame))?;
        if !event::poll(NOTICED_WITHIN)? {
            continue;
        }
        match event::read()? {
            Event::Key(key) if key.kind == KeyEventKind::Press && page.press(key) == Next::Quit => {
                return Ok(());
            }
            // Whatever else there was, a new size, too: it is drawn anew.
            _ => {}
        }
    }
}
