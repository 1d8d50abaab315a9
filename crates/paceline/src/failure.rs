//! How a command ends when it does not end well.

use crate::flags::Problems;
use paceline_exec::ExecError;
use std::io;
use std::process::ExitCode;

/// Why a command did not do what it was asked.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The request is wrong: exit status 2.
    Input(Problems),
    /// The request was right and the run failed: exit status 1.
    Run(anyhow::Error),
    /// The run failed, and whoever started this rank says why: exit status 1.
    Told,
    /// The user did not want to wait for the end of an iteration: exit status 130.
    Interrupted,
    /// Whoever read the output has seen enough, as `head` has: not a failure at all.
    Closed,
}

impl Failure {
    /// What people are told.
    pub(crate) fn message(&self) -> Option<String> {
        match self {
            Self::Input(problems) => Some(problems.to_string()),
            Self::Run(error) => Some(format!("error: {error:#}")),
            Self::Told | Self::Interrupted | Self::Closed => None,
        }
    }

    /// What programs are told.
    pub(crate) fn exit_code(&self) -> ExitCode {
        match self {
            Self::Input(_) => ExitCode::from(2),
            Self::Run(_) | Self::Told => ExitCode::FAILURE,
            Self::Interrupted => ExitCode::from(130),
            Self::Closed => ExitCode::SUCCESS,
        }
    }

    /// One thing is wrong with one flag.
    pub(crate) fn flag(flag: &str, text: impl Into<String>) -> Self {
        let mut problems = Problems::default();
        problems.say(flag, text);
        Self::Input(problems)
    }
}

impl From<Problems> for Failure {
    fn from(problems: Problems) -> Self {
        Self::Input(problems)
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::Closed,
            _ => Self::Run(error.into()),
        }
    }
}

impl From<ExecError> for Failure {
    /// What the executor cannot do is the request's fault; what happened to it is not.
    fn from(error: ExecError) -> Self {
        match error {
            ExecError::Unsupported { .. } | ExecError::Option { .. } | ExecError::Data(_) => {
                let mut problems = Problems::default();
                problems.located(error);
                Self::Input(problems)
            }
            // Its text has its cause in it already.
            other => Self::Run(anyhow::anyhow!("{other}")),
        }
    }
}
