//! The command `session`: commands from stdin, replies to stdout.

use std::io::{self, BufReader, BufWriter};

use client::{
    cli::{
        remote_base::RemoteBaseArguments,
        terminal::{OutputFormat, Terminal},
    },
    masking::Masking,
};
use control_protocol::training::session::CommandReply;
use settings::exit::Exit;
use shmproto::layer::SitePath;

use super::{
    ProgramExit,
    error::TunerError,
    layers::{self, ComputeArguments},
};
use crate::{
    plan::JobPrecision,
    session::{TrainerSession, commands},
};

#[derive(Debug, clap::Args)]
pub(super) struct SessionArguments {
    #[command(flatten)]
    rent: RemoteBaseArguments,
    #[command(flatten)]
    compute: ComputeArguments,
}

/// Executes commands until stdin ends.
pub(super) fn session(arguments: &SessionArguments) -> Result<ProgramExit, TunerError> {
    let masking = Masking::Off { path: SitePath::Fast };
    let rented = arguments.rent.rent(&masking, Terminal { format: OutputFormat::Json, quiet: true })?;
    let base = types::AdapterVersion(rented.session.catalog().base_hash).to_string();
    let all = rented.base.config().layers;
    let (lanes, precision) = layers::lanes(JobPrecision::Serving, &arguments.compute, rented, masking, all)?;
    let mut session = TrainerSession::new(lanes, precision, base);
    let broken = |source| TunerError::System { what: "cannot read or answer commands", source };
    let (mut orders, mut answers) = (BufReader::new(io::stdin().lock()), BufWriter::new(io::stdout().lock()));
    write_reply(&mut answers, &CommandReply::Ready {}, &[]).map_err(broken)?;
    while let Some((order, numbers)) = commands::read(&mut orders).map_err(broken)? {
        let (answer, payload) = session.carry_out(&order, &numbers);
        write_reply(&mut answers, &answer, &payload).map_err(broken)?;
    }
    Ok(ProgramExit::Exit(Exit::Ok))
}

fn write_reply(to: &mut impl io::Write, answer: &CommandReply, payload: &[u8]) -> io::Result<()> {
    serde_json::to_writer(&mut *to, answer)?;
    to.write_all(b"\n")?;
    to.write_all(payload)?;
    to.flush()
}
