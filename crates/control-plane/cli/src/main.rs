//! Entry point of the program `holobiont`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    holobiont::cli::main(std::env::args_os()).into()
}
