//! The first cold adapter of a new host, beside the bucket's own time for the same requests.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
    time::Instant,
};

use anyhow::{Context as _, Result, ensure};

use super::{hosts, hosts::Servers, row};
use crate::{
    config::SuiteConfig,
    machine::Cores,
    measure::Samples,
    report::{BenchTarget, Comparison},
};

/// Maximum time above that of the bucket.
const BESIDE_MS: f64 = 100.0;

pub(super) fn run(config: &SuiteConfig, cores: &Cores) -> Result<Vec<Comparison>> {
    let (folder, servers) = (tempfile::tempdir()?, Servers::start()?);
    let first = servers.host(config, cores, &folder.path().join("first"))?;
    let adapters = hosts::adapters(config, config.runs, &folder.path().join("adapters"))?;
    for (index, path) in adapters.iter().enumerate() {
        hosts::load(&first, &format!("cold-{index}"), path)?;
    }
    let (mut beside, mut fetches) = (Vec::new(), Vec::new());
    for index in 0..config.runs {
        let host = servers.host(config, cores, &folder.path().join(format!("new-{index}")))?;
        drop(servers.bucket.wire.take_asked());
        let begun = Instant::now();
        hosts::ask(&host, &format!("cold-{index}"))?;
        let answered_ms = begun.elapsed().as_secs_f64() * 1e3;
        let asked = servers.bucket.wire.take_asked();
        let asked: Vec<&String> = asked.iter().filter(|head| head.starts_with("GET ")).collect();
        ensure!(!asked.is_empty(), "the new host has fetched nothing");
        let mut fetched_ms = 0.0;
        for head in asked {
            fetched_ms += fetch_ms(servers.bucket.wire.port(), head)?;
        }
        beside.push(answered_ms - fetched_ms);
        fetches.push(fetched_ms);
    }
    let case = "a new host's first cold adapter: what its answer takes beside the bucket's";
    let fetches = ("the same requests to the bucket", Samples::new(fetches)?);
    Ok(vec![row(case, "ms", Samples::new(beside)?, fetches, Some(BenchTarget::OursAtMost(BESIDE_MS)))])
}

fn fetch_ms(port: u16, head: &str) -> Result<f64> {
    let begun = Instant::now();
    let mut stream = TcpStream::connect(("127.0.0.1", port)).context("the bucket is gone")?;
    stream.write_all(format!("{head}\r\n\r\n").as_bytes()).context("the bucket takes no request")?;
    let mut answer = BufReader::new(stream);
    let (mut line, mut length) = (String::new(), 0_u64);
    answer.read_line(&mut line).context("the bucket does not answer")?;
    ensure!(line.contains(" 200") || line.contains(" 206"), "the bucket answers {line}");
    loop {
        line.clear();
        answer.read_line(&mut line).context("the bucket's answer broke off")?;
        if line.trim().is_empty() {
            break;
        }
        if let Some((name, value)) = line.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            length = value.trim().parse().context("the bucket says no length")?;
        }
    }
    let mut body = Vec::new();
    answer.take(length).read_to_end(&mut body).context("the bucket's answer broke off")?;
    ensure!(body.len() as u64 == length, "the bucket's answer broke off");
    Ok(begun.elapsed().as_secs_f64() * 1e3)
}
