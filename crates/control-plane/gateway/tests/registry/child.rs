//! A process that opens the registry, executes commands and reports acknowledgements; it may be killed at any
//! point.
//!
//! The process is this test program, started with an environment variable. Commands are lines `load NAME
//! WEIGHTS`, `fetch NAME WEIGHTS`, `unload NAME`, `pin NAME`, `bring NAME`, `reopen`, `names`; each is
//! answered with one line, `ok ...` or `error CODE`.

use std::{
    io::{BufRead as _, Write as _},
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Stdio},
    sync::Arc,
};

use gateway::{
    adapters::{LoadRequest, Pin, Registry, Replace},
    errors::ApiError,
};

use crate::support::{BASE, admin, files, gone, open, uri_of};

const DIRECTORY: &str = "REGISTRY_TEST_CHILD";

/// Main function of the child. As an ordinary test it does nothing.
#[tokio::test]
async fn the_child_process_of_other_tests_is_idle_when_it_is_nobodys_child() {
    let Some(directory) = std::env::var_os(DIRECTORY).map(PathBuf::from) else {
        return;
    };
    let (mut executor, mut registry) = open(&directory).await.unwrap();
    print_marked("ok open");
    for order in std::io::stdin().lock().lines() {
        let order = order.unwrap();
        if order == "reopen" {
            executor.close();
            gone(registry).await;
            (executor, registry) = open(&directory).await.unwrap();
            print_marked("ok");
            continue;
        }
        match obey(&directory, &registry, &order).await {
            Ok(answer) => print_marked(&format!("ok {answer}")),
            Err(error) => print_marked(&format!("error {}", error.code())),
        }
    }
    // Skips the rest of the test program.
    std::process::exit(0);
}

async fn obey(directory: &Path, registry: &Arc<Registry>, order: &str) -> Result<String, ApiError> {
    let words: Vec<&str> = order.split(' ').collect();
    match words[..] {
        ["load", name, weights] => {
            let path = files(directory, name, weights);
            load(registry, name, path).await
        }
        ["fetch", name, weights] => {
            files(directory, name, weights);
            let uri = uri_of(directory, name).parse().unwrap();
            let fetched = registry.load_named(uri, &admin(), BASE.into()).await;
            fetched.map(|()| String::new()).map_err(ApiError::from)
        }
        ["load-file", name] => load(registry, name, directory.join("root").join(name)).await,
        ["unload", name] => Ok(registry.unload(name, None).await?.to_string()),
        ["pin", name] => Ok(registry.pin(name, Pin::Keep).await.map(|_| String::new())?),
        ["bring", name] => {
            let lease = registry.lease(name, &admin())?.ok_or_else(|| ApiError::model_not_found(name))?;
            registry.load_on(&lease, 0).await?;
            Ok(lease.generation.to_string())
        }
        ["names"] => Ok(registry.entries().keys().cloned().collect::<Vec<_>>().join(",")),
        _ => panic!("no such order: {order}"),
    }
}

async fn load(registry: &Arc<Registry>, name: &str, path: PathBuf) -> Result<String, ApiError> {
    let name = name.to_owned();
    let request = LoadRequest { name, path, replace: Replace::Always, tenant: None, pinned: None };
    Ok(registry.load(request, BASE.into()).await?.record.generation.to_string())
}

/// The test harness writes to standard output too, so a mark distinguishes our lines.
fn print_marked(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n@{line}").unwrap();
    out.flush().unwrap();
}

pub(crate) struct RegistryChild {
    child: Child,
    lines: std::io::Lines<std::io::BufReader<ChildStdout>>,
}

impl RegistryChild {
    /// Starts a child on `directory`, through `wrapper` if not empty, with failpoints in
    /// `DIRECTORY/failpoints`.
    pub(crate) fn start(directory: &Path, wrapper: &[&str]) -> Self {
        let me = std::env::current_exe().unwrap();
        let me = me.to_str().unwrap();
        let name = "child::the_child_process_of_other_tests_is_idle_when_it_is_nobodys_child";
        let words: Vec<&str> = wrapper.iter().copied().chain([me, "--exact", name, "--nocapture"]).collect();
        let mut child = Command::new(words[0])
            .args(&words[1..])
            .env(DIRECTORY, directory)
            .env(failpoint::DIRECTORY, directory.join("failpoints"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = std::io::BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn heard(&mut self) -> Option<String> {
        self.lines.by_ref().map_while(Result::ok).find_map(|line| line.strip_prefix('@').map(str::to_owned))
    }

    /// Sends a command and waits for the answer; `None` if the child ended.
    pub(crate) fn order(&mut self, order: &str) -> Option<String> {
        // The child may have ended already.
        let _ = writeln!(self.child.stdin.as_mut().unwrap(), "{order}");
        self.heard()
    }

    pub(crate) fn end(mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}
