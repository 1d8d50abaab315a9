//! The run that `--resume` names: its directory, and its settings as flags.

use paceline_exec::checkpoint::Checkpoint;
use std::path::{Path, PathBuf};

/// File with a run's settings as flags, in its directory and beside each of its checkpoints.
pub(crate) const SETTINGS: &str = "run.toml";

/// A run as found from the path of `--resume`.
#[derive(Clone, Debug, Default)]
pub(crate) struct ResumedRun {
    /// The run's directory; `None` for a checkpoint that lies elsewhere.
    pub home: Option<PathBuf>,
    /// File with its settings.
    pub settings: Option<PathBuf>,
    /// True if there is a checkpoint, so that the run does not start from its beginning.
    pub has_checkpoint: bool,
}

impl ResumedRun {
    /// Finds the run of a directory, of its checkpoints, or of one of them.
    pub(crate) fn find(path: &Path) -> Self {
        let plain = path.file_name().is_some();
        let path = if plain { Some(path.to_owned()) } else { path.canonicalize().ok() };
        let Some(path) = path else { return Self::default() };
        let has = |directory: &Path| directory.join(SETTINGS).is_file();
        let has_checkpoint = Checkpoint::is_near(&path);
        let folder = |path: &Path| path.ends_with(paceline_exec::checkpoint::FOLDER);
        if has_checkpoint && Checkpoint::is_one(&path) {
            let above = path.parent().filter(|above| folder(above)).and_then(Path::parent);
            let home = above.filter(|home| has(home)).map(Path::to_owned);
            let settings = Some(path.join(SETTINGS)).filter(|file| file.is_file());
            return Self { home, settings, has_checkpoint };
        }
        let above = path.parent().filter(|_| folder(&path)).map(Path::to_owned);
        let home = above.into_iter().chain([path]).find(|home| has(home));
        let settings = home.as_ref().map(|home| home.join(SETTINGS));
        Self { home, settings, has_checkpoint }
    }
}
