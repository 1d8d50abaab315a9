//! Failures of a command, their messages and exit codes.

use crate::flags::{Problem, Problems};
use paceline_exec::ExecError;
use serde::Serialize;
use std::io;
use std::process::ExitCode;

/// Reason that a command failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The request is wrong: exit status 2.
    Input(Problems),
    /// The request was valid and the run failed: exit status 1.
    Run(anyhow::Error),
    /// The run failed, and the launcher of this rank reports why: exit status 1.
    Reported,
    /// A signal ended the command before it was done: exit status 128 + its number, which is 130
    /// for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP and 138 for SIGUSR1.
    Signalled(i32),
    /// The reader of the output closed it, as `head` does: exit status 0.
    Closed,
}

impl Failure {
    /// The message for the user.
    pub(crate) fn message(&self) -> Option<String> {
        match self {
            Self::Input(problems) => Some(problems.to_string()),
            Self::Run(error) => Some(format!("error: {error:#}")),
            Self::Reported | Self::Signalled(_) | Self::Closed => None,
        }
    }

    /// The message as a JSON object; `None` where there is none.
    pub(crate) fn record(&self) -> Option<String> {
        let problems = match self {
            Self::Input(problems) => problems.all(),
            Self::Run(_) | Self::Reported | Self::Signalled(_) | Self::Closed => Vec::new(),
        };
        let record = Record { error: self.message()?, exit_status: self.status(), problems };
        serde_json::to_string(&record).ok()
    }

    /// The exit code of the process.
    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.status())
    }

    fn status(&self) -> u8 {
        match self {
            Self::Closed => 0,
            Self::Run(_) | Self::Reported => 1,
            Self::Input(_) => 2,
            Self::Signalled(signal) => u8::try_from(128 + signal).unwrap_or(130),
        }
    }

    /// Creates an input failure about one flag.
    pub(crate) fn flag(flag: &str, text: impl Into<String>) -> Self {
        let mut problems = Problems::default();
        problems.add(flag, text);
        Self::Input(problems)
    }
}

/// A failure as JSON.
#[derive(Serialize)]
struct Record<'a> {
    error: String,
    exit_status: u8,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    problems: Vec<Problem<'a>>,
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
    /// Unsupported requests are input failures; errors during execution are run failures.
    fn from(error: ExecError) -> Self {
        match error {
            ExecError::Unsupported { .. } | ExecError::Option { .. } | ExecError::Data(_) => {
                let mut problems = Problems::default();
                problems.located(error);
                Self::Input(problems)
            }
            // Its text already contains its cause.
            other => Self::Run(anyhow::anyhow!("{other}")),
        }
    }
}
