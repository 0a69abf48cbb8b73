//! Unknown options given in place of the program, with hints for those of `torchrun`.

use std::ffi::OsStr;

use comm::{Error, Result};

/// Hints for options of `torchrun`.
const TORCHRUN: [(&[&str], &str); 12] = [
    (&["--rdzv-endpoint"], "the launchers meet at --master-addr HOST and --master-port PORT"),
    (
        &["--rdzv-backend", "--rdzv-id", "--rdzv-conf"],
        "leave it out: the launchers meet at --master-addr HOST and --master-port PORT, without anything between them",
    ),
    (&["--standalone"], "leave it out: without --nnodes a job needs nobody else"),
    (&["--no-python"], "leave it out: PROGRAM may be any"),
    (&["--module", "-m"], "give python -m MODULE as PROGRAM"),
    (&["--redirects", "-r"], "--log-dir DIR keeps both streams of each rank"),
    (
        &["--monitor-interval"],
        "leave it out: the end of a rank is seen at once, without looking for it at intervals",
    ),
    (&["--start-method"], "leave it out: each rank is a new process, which is torchrun's spawn"),
    (
        &["--signals-to-handle"],
        "leave it out: SIGINT, SIGTERM and SIGHUP end the job, and SIGUSR1 and SIGUSR2 are passed on to the ranks",
    ),
    (&["--local-addr"], "set GIRANDOLE_BIND to the address on which this machine listens"),
    (&["--run-path"], "give python FILE as PROGRAM"),
    (
        &["--logs-specs", "--log-line-prefix-template", "--event-log-handler"],
        "leave it out: --log-dir DIR keeps what each rank prints, by attempt and rank",
    ),
];

/// Rejects an option in the position of the program.
pub(super) fn check(name: &OsStr) -> Result<()> {
    let got = name.to_string_lossy();
    if !got.starts_with('-') {
        return Ok(());
    }
    let typed = got.split('=').next().unwrap_or_default().replace('_', "-");
    let found = TORCHRUN.iter().find(|(options, _)| options.contains(&typed.as_str()));
    let help = found.map_or("see girandole launch --help", |(_, help)| help);
    Err(Error::invalid(
        "launch",
        got,
        format!("there is no such option; {help}; if it is a program, give its path"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_told_from_programs_and_torchruns_are_known() {
        let said = |name: &str| check(name.as_ref()).map_err(|error| error.to_string());
        assert_eq!((said("train"), said("./-train")), (Ok(()), Ok(())));
        for (name, help) in [
            ("--rdzv-endpoint=x", "the launchers meet at --master-addr"),
            ("--rdzv_backend", "leave it out"),
            ("-m", "python -m MODULE"),
            ("--monitor-interval=5", "leave it out: the end of a rank is seen at once"),
            ("--start_method", "torchrun's spawn"),
            ("--signals-to-handle", "SIGUSR1 and SIGUSR2 are passed on"),
            ("--nproc-per-nod=2", "girandole launch --help"),
        ] {
            let line = said(name).unwrap_err();
            assert!(line.starts_with(&format!("launch: got {name}; there is no such option; ")), "{line}");
            assert!(line.contains(help), "{line}");
        }
    }
}
