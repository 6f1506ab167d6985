//! The drawn page of `holobiont top`: token rates over time, memory by kind, executors, adapters.

use std::collections::VecDeque;

use control_protocol::status::ExecutorStatus;
use ratatui::{
    Frame,
    crossterm::event::{KeyCode, KeyEvent, KeyModifiers},
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style},
    text::{Line, Span},
    widgets::{Block, Borders, Paragraph, Row, Sparkline, Table},
};

use super::{
    cells,
    stats::{DashboardSnapshot, MemoryKind, memory},
};
use crate::{
    client::ClientError,
    terminal::{TextStyle, printable, table::size},
};

/// Number of rates kept; more than the widest terminal shows.
const MAX_RATES: usize = 1024;

/// Minimum terminal width in columns at which memory and executors stand side by side.
const WIDE: u16 = 140;

/// Width of a bar in cells.
const BAR: u128 = 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    Stay,
    Quit,
}

#[derive(Debug)]
pub(super) struct Page {
    url: String,
    ink: TextStyle,
    /// First snapshot; first-token times are counted from here.
    first: DashboardSnapshot,
    last: DashboardSnapshot,
    /// Generated tokens per second in tenths, newest last.
    rates: VecDeque<u64>,
    /// Error of the latest fetch, if it failed.
    trouble: Option<String>,
    /// Number of table lines of the model table scrolled out of view.
    scrolled: usize,
}

impl Page {
    pub(super) fn new(url: &str, first: DashboardSnapshot, ink: TextStyle) -> Self {
        let rates = VecDeque::from([tenths(first.status.stats.tokens_per_s.generated)]);
        Self { url: printable(url), ink, last: first.clone(), first, rates, trouble: None, scrolled: 0 }
    }

    /// Adds a snapshot; after a failed fetch, the last snapshot stays with the error.
    pub(super) fn update(&mut self, look: Result<DashboardSnapshot, ClientError>) {
        match look {
            Ok(look) => {
                self.rates.push_back(tenths(look.status.stats.tokens_per_s.generated));
                if self.rates.len() > MAX_RATES {
                    self.rates.pop_front();
                }
                (self.last, self.trouble) = (look, None);
            }
            Err(error) => self.trouble = Some(printable(&error.to_string()).replace('\n', " ")),
        }
    }

    pub(super) fn press(&mut self, key: KeyEvent) -> Next {
        let is_control_c = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return Next::Quit,
            _ if is_control_c => return Next::Quit,
            KeyCode::Down | KeyCode::Char('j') => self.scrolled += 1,
            KeyCode::Up | KeyCode::Char('k') => self.scrolled = self.scrolled.saturating_sub(1),
            _ => {}
        }
        self.scrolled = self.scrolled.min(self.last.rows(None).len().saturating_sub(1));
        Next::Stay
    }

    pub(super) fn draw(&self, frame: &mut Frame) {
        let memory = self.memory();
        let executors = u16::try_from(self.last.executors.len()).unwrap_or(u16::MAX).saturating_add(3);
        let kinds = u16::try_from(memory.len()).unwrap_or(u16::MAX).saturating_add(2);
        let is_wide = frame.area().width >= WIDE;
        let middle = if is_wide { executors.max(kinds) } else { executors.saturating_add(kinds) };
        let [head, rates, middle, models, foot] = Layout::vertical([
            Constraint::Length(3),
            Constraint::Max(8),
            Constraint::Max(middle),
            Constraint::Min(4),
            Constraint::Length(1),
        ])
        .areas(frame.area());
        let sides = [Constraint::Fill(1), Constraint::Fill(1)];
        let stacked = [Constraint::Max(kinds), Constraint::Fill(1)];
        let [left, right] = if is_wide {
            Layout::horizontal(sides).areas(middle)
        } else {
            Layout::vertical(stacked).areas(middle)
        };
        frame.render_widget(Paragraph::new(self.head()), head);
        self.draw_rates(frame, rates);
        frame.render_widget(Paragraph::new(memory).block(self.block("memory")), left);
        self.draw_executors(frame, right);
        self.draw_models(frame, models);
        frame.render_widget(Line::styled("q quits   up and down scroll", self.dim()), foot);
    }

    fn head(&self) -> Vec<Line<'static>> {
        let rows = cells::rows(&self.last);
        let mut lines: Vec<Line> = rows
            .into_iter()
            .map(|(name, value)| {
                Line::from(vec![Span::styled(format!("{name:<10}"), self.dim()), Span::raw(value)])
            })
            .collect();
        if let Some(trouble) = &self.trouble {
            let text = format!("{} does not answer; showing its last figures: {trouble}", self.url);
            lines[0] = Line::styled(text, self.styled(Color::Red));
        }
        lines
    }

    fn draw_rates(&self, frame: &mut Frame, area: Rect) {
        let block = self.block("tokens generated a second");
        let columns = usize::from(block.inner(area).width);
        // The newest rate is at the right; older rates that do not fit are left out.
        let seen = self.rates.iter().skip(self.rates.len().saturating_sub(columns)).copied();
        let sparkline = Sparkline::default().data(seen).style(self.styled(Color::Green)).block(block);
        frame.render_widget(sparkline, area);
    }

    /// Returns one bar for each kind of memory of each executor.
    fn memory(&self) -> Vec<Line<'static>> {
        let of = |one: &ExecutorStatus| -> Vec<Line<'static>> {
            memory(one).iter().map(|kind| self.kind(&one.name, kind)).collect()
        };
        self.last.executors.iter().flat_map(of).collect()
    }

    fn kind(&self, executor: &str, kind: &MemoryKind) -> Line<'static> {
        let whose = if self.last.executors.len() > 1 { format!("{executor:<10} ") } else { String::new() };
        let what = format!("{whose}{:<6} {:<10} ", kind.of, kind.name);
        let bar = Span::styled(bar(kind.bytes, kind.limit_bytes), self.styled(Color::Cyan));
        let sizes = format!(" {} of {}", size(kind.bytes), size(kind.limit_bytes));
        Line::from(vec![Span::raw(what), bar, Span::raw(sizes)])
    }

    fn draw_executors(&self, frame: &mut Frame, area: Rect) {
        let rows = self.last.executors.iter().map(|one| Row::new(cells::executor(one)));
        let widths = [10, 12, 16, 6].map(Constraint::Length).into_iter().chain([Constraint::Fill(1)]);
        let table =
            Table::new(rows, widths).header(self.titles(cells::EXECUTORS)).block(self.block("executors"));
        frame.render_widget(table, area);
    }

    fn draw_models(&self, frame: &mut Frame, area: Rect) {
        let rows = self.last.rows(Some(&self.first));
        let rows = rows.iter().skip(self.scrolled).map(|row| Row::new(cells::model(row)));
        let widths = [Constraint::Fill(1)].into_iter().chain([6, 6, 8, 11, 9, 7].map(Constraint::Length));
        let since = self.last.status.uptime_s.saturating_sub(self.first.status.uptime_s);
        let title = format!("models, first tokens of the last {since} s");
        let table = Table::new(rows, widths).header(self.titles(cells::MODELS)).block(self.block(title));
        frame.render_widget(table, area);
    }

    fn titles<const N: usize>(&self, titles: [&'static str; N]) -> Row<'static> {
        Row::new(titles).style(self.modified(Modifier::BOLD))
    }

    fn block<'a>(&self, title: impl Into<Line<'a>>) -> Block<'a> {
        Block::new().borders(Borders::TOP).title(title).border_style(self.dim())
    }

    fn dim(&self) -> Style {
        self.modified(Modifier::DIM)
    }

    fn modified(&self, modifier: Modifier) -> Style {
        if self.ink == TextStyle::Ansi { Style::new().add_modifier(modifier) } else { Style::new() }
    }

    fn styled(&self, color: Color) -> Style {
        if self.ink == TextStyle::Ansi { Style::new().fg(color) } else { Style::new() }
    }
}

/// Returns a bar of `part` in `whole`; any nonzero part fills at least one cell.
fn bar(part: u64, whole: u64) -> String {
    let is_full = |cell: u128| u128::from(part) * BAR > cell * u128::from(whole);
    (0..BAR).map(|cell| if is_full(cell) { '█' } else { '░' }).collect()
}

/// Converts a rate to tenths, so that slow models have a visible curve too.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "rates are small and not negative"
)]
fn tenths(rate: f64) -> u64 {
    (rate * 10.0).max(0.0) as u64
}

#[cfg(test)]
mod tests {
    use ratatui::{Terminal, backend::TestBackend};

    use super::*;
    use crate::commands::top::stats::tests::snapshot;

    fn shown(page: &Page, columns: u16, rows: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(columns, rows)).unwrap();
        terminal.draw(|frame| page.draw(frame)).unwrap();
        terminal.backend().to_string()
    }

    fn key(code: KeyCode) -> KeyEvent {
        KeyEvent::new(code, KeyModifiers::NONE)
    }

    #[test]
    fn a_page_shows_everything_side_by_side_or_below_each_other() {
        let mut page = Page::new("http://gateway", snapshot(0.0, 4), TextStyle::Ansi);
        page.update(Ok(snapshot(37.5, 6)));
        for (columns, rows) in [(140, 36), (80, 40)] {
            let text = shown(&page, columns, rows);
            for part in [
                "smol, serving for 9 s, version 1.2",
                "2 running, 1 waiting",
                "37.5 generated, 5.0 of prompts",
                "█",
                "history    ████████░░░░░░░░ 4.00 KiB of 8.00 KiB",
                "weights    ████░░░░░░░░░░░░ 2.00 KiB of 8.00 KiB",
                "1 of 2, core 3 75 %",
                "FIRST TOKEN",
                "pirate",
                "50 ms",
                "q quits",
            ] {
                assert!(text.contains(part), "{part} is not in\n{text}");
            }
            let pirate = text.lines().find(|line| line.contains("pirate")).unwrap();
            assert!(
                pirate.trim_end_matches(['"', ' ']).ends_with(" 2"),
                "those of this page alone: {pirate}"
            );
        }
    }

    #[test]
    fn a_terminal_may_be_as_small_as_it_likes() {
        let page = Page::new("http://gateway", snapshot(1.0, 1), TextStyle::None);
        for (columns, rows) in [(1, 1), (20, 5), (300, 3), (10, 100)] {
            let _ = shown(&page, columns, rows);
        }
    }

    #[test]
    fn who_does_not_answer_is_named_and_the_last_figures_stay_until_there_are_new_ones() {
        let mut page = Page::new("http://gateway", snapshot(1.0, 1), TextStyle::None);
        page.update(Err(ClientError::Lost(None)));
        let text = shown(&page, 120, 36);
        assert!(text.contains("http://gateway does not answer") && text.contains("pirate"), "{text}");
        page.update(Ok(snapshot(1.0, 1)));
        assert!(!shown(&page, 120, 36).contains("does not answer"));
    }

    #[test]
    fn keys_scroll_as_far_as_there_is_something_and_quit() {
        let mut page = Page::new("http://gateway", snapshot(1.0, 1), TextStyle::None);
        for _ in 0..9 {
            assert_eq!(page.press(key(KeyCode::Down)), Next::Stay);
        }
        let text = shown(&page, 120, 36);
        assert!(!text.contains("pirate") && text.contains("slow"), "the last one stays: {text}");
        page.press(key(KeyCode::Up));
        assert!(shown(&page, 120, 36).contains("pirate"));
        let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        for quits in [key(KeyCode::Char('q')), key(KeyCode::Esc), control_c] {
            assert_eq!(page.press(quits), Next::Quit);
        }
        assert_eq!(page.press(key(KeyCode::Char('c'))), Next::Stay);
    }
}
