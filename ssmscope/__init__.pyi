# Names of the package, each imported when it is asked for; `__init__.py` reads them here too.
import typing

from ssmscope import architectures as architectures
from ssmscope import attacks as attacks
from ssmscope import backends as backends
from ssmscope import interp as interp
from ssmscope import ops as ops
from ssmscope import probes as probes
from ssmscope.api.results import Result as Result
from ssmscope.architectures.loading.load import load as load
from ssmscope.attacks.effect import attack_effect as attack_effect
from ssmscope.attacks.insertion import insertion_sweep as insertion_sweep
from ssmscope.attacks.noise import character_noise as character_noise
from ssmscope.attacks.overflow import state_overflow as state_overflow
from ssmscope.attacks.poisoning import state_poisoning as state_poisoning
from ssmscope.attacks.position import position_bias as position_bias
from ssmscope.attacks.prompts import prompt_attack as prompt_attack
from ssmscope.attacks.words import word_attack as word_attack
from ssmscope.core.edits import Edit as Edit
from ssmscope.core.edits import edited as edited
from ssmscope.core.forms import Form as Form
from ssmscope.core.lasting_edits import clamped_state as clamped_state
from ssmscope.core.lasting_edits import frozen_decays as frozen_decays
from ssmscope.core.lasting_edits import held_state as held_state
from ssmscope.core.lasting_edits import while_writing as while_writing
from ssmscope.core.mixers import adapt as adapt
from ssmscope.core.mixers import fast_scan as fast_scan
from ssmscope.core.model import Model as Model
from ssmscope.core.trace import LayerTrace as LayerTrace
from ssmscope.core.trace import Trace as Trace
from ssmscope.data.text import load_text as load_text
from ssmscope.errors import InputError as InputError
from ssmscope.evaluation import Evaluator as Evaluator
from ssmscope.interp.attention import attention_gradient as attention_gradient
from ssmscope.interp.attention import implicit_attention as implicit_attention
from ssmscope.interp.explain import explain as explain
from ssmscope.interp.fidelity import fidelity_auc as fidelity_auc
from ssmscope.interp.fidelity.result import fidelity_table as fidelity_table
from ssmscope.interp.heatmap import selection_heatmap as selection_heatmap
from ssmscope.interp.plausibility import plausibility as plausibility
from ssmscope.interp.sanity import cascading_randomisation as cascading_randomisation
from ssmscope.ops import Recurrence as Recurrence
from ssmscope.probes.bound import generalization_bound as generalization_bound
from ssmscope.probes.checkpoints import stability_table as stability_table
from ssmscope.probes.influence import influence as influence
from ssmscope.probes.lens import fit_lens as fit_lens
from ssmscope.probes.lens import trajectory as trajectory
from ssmscope.probes.lens.lenses import load_lens as load_lens
from ssmscope.probes.lens.lenses import logit_lens as logit_lens
from ssmscope.probes.loss import token_loss as token_loss
from ssmscope.probes.retrieval import retrieval as retrieval
from ssmscope.probes.snr import needle_snr as needle_snr
from ssmscope.probes.stability import stability as stability

__version__: str

def __getattr__(name: str) -> typing.Any: ...  # Verbs: `ssmscope.heatmap` is `selection_heatmap`.
