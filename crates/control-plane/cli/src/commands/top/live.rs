//! The interactive loop of `holobiont top`: draws snapshots and handles keys until the user quits.

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

/// Longest delay before a key press or a new snapshot is handled.
const NOTICED_WITHIN: Duration = Duration::from_millis(100);

/// Draws the deployment until the user quits, then restores the terminal.
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

/// Fetches snapshots on a thread of its own, so that the user can quit while a gateway does not answer.
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
            // Every other event, such as a resize, leads to a redraw.
            _ => {}
        }
    }
}
