"""Many short questions to one model, as fast as it can answer them: prompts, label words, scores."""

from ssmscope.evaluation.evaluator import Evaluator as Evaluator
from ssmscope.evaluation.template import Template as Template
from ssmscope.evaluation.verbalizer import LabelWords as LabelWords
from ssmscope.evaluation.verbalizer import label_words as label_words
