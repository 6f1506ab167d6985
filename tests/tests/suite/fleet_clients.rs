//! A whole fleet (Envoy, two pickers, three hosts, PostgreSQL, a bucket) as clients see it: through the
//! unmodified `openai` package, and by counters of the answering hosts.

use std::{
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::Duration,
};

use e2e_tests::{
    CompletionRequest, eventually,
    fixtures::{self, prompt},
    fleet::shared::SharedFleet,
    watched,
};

/// Python with the packages of `scripts/python-requirements.txt`.
fn python() -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.venv/bin/python");
    let has_openai = Command::new(&path).args(["-c", "import openai"]).output();
    has_openai.is_ok_and(|output| output.status.success()).then_some(path)
}

/// Starts three hosts that share adapters, each registered on another host; prints a reason if this is
/// impossible.
fn fleet() -> Option<SharedFleet> {
    let fleet = SharedFleet::start(3).inspect_err(|why| eprintln!("skipped: {why}")).ok()?;
    let clients = fleet.clients();
    for (client, name) in clients.iter().zip(["pirate", "haiku"]) {
        let path = fleet.adapters().join(name);
        fixtures::variant(name, 16, &path);
        let _ = client.load(name, &path);
    }
    let all = |client: &e2e_tests::Client| client.registered().is_some_and(|listed| listed.len() == 2);
    eventually("all hosts know both", || clients.iter().all(all));
    Some(fleet)
}

#[test]
fn the_openai_package_gets_from_a_fleet_what_each_of_its_hosts_says() {
    watched(|| {
        let Some(python) = python() else {
            return eprintln!(
                "skipped: there is no openai; .venv/bin/pip install -r scripts/python-requirements.txt"
            );
        };
        let Some(fleet) = fleet() else { return };
        let hosts: Vec<String> = fleet.clients().iter().map(|client| client.url().to_owned()).collect();
        let scenario = Path::new(env!("CARGO_MANIFEST_DIR")).join("python/fleet/scenario.py");
        let mut command = Command::new(python);
        command.arg(scenario).env("HOLOBIONT_URL", fleet.front.client.url());
        let output = command.env("HOLOBIONT_HOSTS", hosts.join(",")).output().expect("it starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    });
}

#[test]
fn requests_of_an_adapter_with_one_beginning_stay_with_one_of_the_hosts_that_all_could_answer() {
    watched(|| {
        let Some(fleet) = fleet() else { return };
        let generated = || -> Vec<f64> {
            fleet.clients().iter().map(|client| client.metric("holobiont_generated_tokens_total")).collect()
        };
        let before = generated();
        let beginning = prompt(3, 300);
        for index in 0..6 {
            let ask = CompletionRequest::new("haiku", [&beginning[..], &prompt(100 + index, 5)].concat(), 4);
            assert!(fleet.front.client.ask(&ask).generation.is_some());
            // Time in which the pickers learn that all hosts are idle.
            thread::sleep(Duration::from_millis(300));
        }
        let new: Vec<f64> = generated().iter().zip(before).map(|(now, before)| now - before).collect();
        assert!(new.contains(&24.0), "one host has answered all: {new:?}");
    });
}
