# Names of the package, each imported when it is asked for; verbs are names of their functions.

from ssmscope import attacks as attacks
from ssmscope import backends as backends
from ssmscope import interp as interp
from ssmscope import loading as loading
from ssmscope import ops as ops
from ssmscope import probes as probes
from ssmscope.api.results import Result as Result
from ssmscope.attacks.effect import attack_effect
from ssmscope.attacks.insertion import insertion_sweep
from ssmscope.attacks.noise import character_noise
from ssmscope.attacks.overflow import state_overflow
from ssmscope.attacks.poisoning import state_poisoning
from ssmscope.attacks.position import position_bias
from ssmscope.attacks.prompts import prompt_attack
from ssmscope.attacks.words import word_attack
from ssmscope.core.adapted import Terms as Terms
from ssmscope.core.adapted import adapt as adapt
from ssmscope.core.edits import Edit as Edit
from ssmscope.core.edits import edited as edited
from ssmscope.core.forms import Form as Form
from ssmscope.core.known_models import demos
from ssmscope.core.lasting_edits import clamped_state as clamped_state
from ssmscope.core.lasting_edits import frozen_decays as frozen_decays
from ssmscope.core.lasting_edits import held_state as held_state
from ssmscope.core.lasting_edits import while_writing as while_writing
from ssmscope.core.mixers import fast_scan as fast_scan
from ssmscope.core.model import Model as Model
from ssmscope.core.trace import LayerTrace as LayerTrace
from ssmscope.core.trace import Trace as Trace
from ssmscope.data.series import labelled_series as labelled_series
from ssmscope.data.text import load_text as load_text
from ssmscope.errors import InputError as InputError
from ssmscope.evaluation import Evaluator as Evaluator
from ssmscope.interp.ablate import ablate as ablate
from ssmscope.interp.attention import implicit_attention
from ssmscope.interp.circuit import circuit as circuit
from ssmscope.interp.explain import explain as explain
from ssmscope.interp.fidelity import fidelity_auc
from ssmscope.interp.fidelity.result import fidelity_table as fidelity_table
from ssmscope.interp.generate import generate as generate
from ssmscope.interp.heatmap import selection_heatmap
from ssmscope.interp.knockout import knockout as knockout
from ssmscope.interp.patch import patch as patch
from ssmscope.interp.plausibility import plausibility as plausibility
from ssmscope.interp.sanity import cascading_randomisation
from ssmscope.interp.steer import steer as steer
from ssmscope.loading.load import load as load
from ssmscope.ops import Recurrence as Recurrence
from ssmscope.probes.bound import generalization_bound
from ssmscope.probes.checkpoints import stability_table
from ssmscope.probes.evaluate import evaluate as evaluate
from ssmscope.probes.influence import influence as influence
from ssmscope.probes.lens import fit_lens, trajectory
from ssmscope.probes.lens.lenses import load_lens as load_lens
from ssmscope.probes.lens.lenses import logit_lens as logit_lens
from ssmscope.probes.loss import token_loss
from ssmscope.probes.parity import parity as parity
from ssmscope.probes.precision import precision as precision
from ssmscope.probes.retrieval import retrieval as retrieval
from ssmscope.probes.snr import needle_snr
from ssmscope.probes.stability import stability as stability
from ssmscope.probes.stability.training import state_numbers as state_numbers
from ssmscope.probes.stability.training import training_callback as training_callback
from ssmscope.probes.states import states as states
from ssmscope.probes.states.files import load_states as load_states
from ssmscope.probes.states.files import save_states as save_states
from ssmscope.reports.hub import push as push
from ssmscope.reports.running import run_plan
from ssmscope.reports.serving import serve as serve
from ssmscope.zoo.training import train_model

attention = implicit_attention
bound = generalization_bound
checkpoints = stability_table
effect = attack_effect
fidelity = fidelity_auc
heatmap = selection_heatmap
insertion = insertion_sweep
lens_fit = fit_lens
lens_show = trajectory
loss = token_loss
models = demos
noise = character_noise
overflow = state_overflow
poison = state_poisoning
position = position_bias
prompts = prompt_attack
report = run_plan
sanity = cascading_randomisation
snr = needle_snr
train = train_model
words = word_attack

__version__: str
