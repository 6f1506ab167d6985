//! Commands at a terminal.

use std::{
    io::Write as _,
    path::PathBuf,
    process::{Child, Command, Stdio},
};

use super::{CommandFixture, eventually_some};

/// A command at a terminal of its own, which `script` makes.
pub(crate) struct AtTerminal {
    child: Child,
    shown: PathBuf,
}

impl AtTerminal {
    pub(crate) fn start(command: &Command, stage: &CommandFixture, text: &str) -> Self {
        let shown = stage.home.path().join("typescript");
        // The file may hold the output of an earlier command.
        let _ = std::fs::remove_file(&shown);
        let words = [command.get_program()].into_iter().chain(command.get_args());
        let line: Vec<_> = words.map(|word| word.to_str().unwrap()).collect();
        let mut script = Command::new("script");
        script
            .args(["--quiet", "--flush", "--return", "--command"])
            .arg(format!("stty cols 80 rows 24; exec {}", line.join(" ")))
            .arg(&shown);
        script.env_clear().envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        script.env("TERM", "xterm").env("SHELL", "/bin/sh");
        let child = script.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let terminal = Self { child, shown };
        terminal.wait_for(text);
        terminal
    }

    pub(crate) fn shown(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.shown).unwrap_or_default()).into_owned()
    }

    pub(crate) fn typescript(&self) -> PathBuf {
        self.shown.clone()
    }

    pub(crate) fn wait_for(&self, text: &str) {
        self.wait_for_all(&[text]);
    }

    /// Waits until `texts` have been shown in this order.
    pub(crate) fn wait_for_all(&self, texts: &[&str]) {
        let all =
            |shown: &str| texts.iter().try_fold(shown, |rest, text| Some(rest.split_once(text)?.1)).is_some();
        eventually_some(&format!("{texts:?} in {:?}", self.shown()), || all(&self.shown()).then_some(()));
    }

    pub(crate) fn keys(&mut self, keys: &str) {
        let stdin = self.child.stdin.as_mut().unwrap();
        stdin.write_all(keys.as_bytes()).and_then(|()| stdin.flush()).unwrap();
    }

    /// Ends the command with a key and returns its exit code. A key during output is ignored, so it is sent
    /// repeatedly.
    pub(crate) fn end(mut self, key: &str) -> Option<i32> {
        let ended = eventually_some("the end of the command", || {
            let stdin = self.child.stdin.as_mut().unwrap();
            let _ = stdin.write_all(key.as_bytes()).and_then(|()| stdin.flush());
            self.child.try_wait().unwrap()
        });
        ended.code()
    }
}

impl Drop for AtTerminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
